// Sorting, filtering and paging of tables. Without it they stand there whole.
for (const table of document.querySelectorAll("table.sorts")) {
  const PAGE = 100;
  const SHORT = 5; // lines that need no filter
  const each = table.dataset.each; // the word for a line
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const nSettings = heads.length - Math.max(0, ...[...body.querySelectorAll("td[colspan]")].map((cell) => cell.colSpan));
  const rows = [...body.rows].map((element, order) => ({ element, order, text: element.dataset.found ?? element.textContent.toLowerCase() }));
  const names = new Set((table.dataset.names ?? "").split(" "));
  const collator = new Intl.Collator("en", { numeric: true });
  let shown = rows;
  let page = 0;

  // A failed run has cells for its settings only.
  function value(row, column) {
    const cell = row.element.classList.contains("failed") && column >= nSettings ? null : row.element.cells[column];
    const text = cell ? cell.textContent.trim() : "";
    if (heads[column].classList.contains("t") || column === 0) return text === "–" || !text ? null : text;
    const number = Number.parseFloat(text);
    return Number.isNaN(number) ? null : number;
  }

  function sort(column) {
    const head = heads[column];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const values = new Map(rows.map((row) => [row, value(row, column)]));
    rows.sort((a, b) => {
      const [x, y] = [values.get(a), values.get(b)];
      if (x === null || y === null) return (x === null) - (y === null) || a.order - b.order; // what has no value comes last
      const order = typeof x === "number" ? x - y : collator.compare(x, y);
      return (up ? order : -order) || a.order - b.order;
    });
    body.append(...rows.map((row) => row.element));
    filter();
  }

  // A setting's name belongs to the word behind it, so that "batch 8" finds neither batch 80 nor another 8.
  function meant(typed) {
    const words = typed.slice(0, 200).toLowerCase().split(/[\s=_,:]+/).filter(Boolean);
    const found = [];
    for (let at = 0; at < words.length; at += 1) {
      const named = [];
      while (names.has(words[at]) && at + 1 < words.length) named.push(words[at++]);
      const text = [...named, words[at]].map((word) => word.replace(/[^\p{L}\p{N}]/gu, "\\$&")).join(" ");
      found.push(new RegExp((named.length ? "(?<![\\w.])" : "") + text + (named.length && /^\d/.test(words[at]) ? "(?![\\w.])" : "")));
    }
    return found;
  }

  function filter() {
    const words = meant(box.value);
    shown = rows.filter((row) => words.every((word) => word.test(row.text)));
    page = 0;
    show();
  }

  function show() {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const visible = new Set(shown.slice(page * PAGE, (page + 1) * PAGE));
    for (const row of rows) row.element.hidden = !visible.has(row);
    const first = shown.length ? page * PAGE + 1 : 0;
    const last = Math.min((page + 1) * PAGE, shown.length);
    const which = pages > 1 ? `${each}s ${first} to ${last} of ${shown.length}` : `${shown.length} ${each}${shown.length === 1 ? "" : "s"}`;
    count.textContent = shown.length < rows.length ? `${which} (${rows.length} in all)` : which;
    before.hidden = after.hidden = pages === 1;
    before.disabled = page === 0;
    after.disabled = page === pages - 1;
  }

  function button(text, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  }

  function tools() {
    const made = document.createElement("p");
    made.className = "tools";
    table.parentElement.before(made);
    return made;
  }

  const box = document.createElement("input");
  box.type = "search";
  box.placeholder = each === "run" ? "Filter, such as: lru batch 8" : "Filter";
  box.setAttribute("aria-label", `Filter the ${each}s by words`);
  box.addEventListener("input", filter);
  const count = document.createElement("span");
  count.setAttribute("role", "status");
  const turn = (by) => () => {
    page += by;
    show();
    table.parentElement.scrollTop = 0;
  };
  const before = button("‹ previous", turn(-1));
  const after = button("next ›", turn(1));
  const above = table.parentElement.previousElementSibling;
  if (rows.length > SHORT || each === "run") (above.matches(".tools") ? above : tools()).prepend(box, count, before, after);
  heads.forEach((head, column) => {
    const text = head.textContent;
    head.textContent = "";
    head.append(button(text, () => sort(column)));
  });
  show();
}
