// Prefetch parts, as in `moesim.policies.parts.prefetch`: which experts of a later layer to fetch before they are asked for.
#include "parts.hpp"

namespace moesim {

/// Count the rows of each expert among the best `top_k` of every row of ids, on top of what is counted.
void Predicted::add_rows(std::vector<i64> &counts, i64 top_k) const {
    i64 n = i64(counts.size()), width = std::min<i64>(ids->buffer.shape[of_layer < 0 ? 1 : 2], top_k);
    for (i64 row = 0; row < n_rows; ++row)
        for (i64 at = 0; at < width; ++at) {
            i64 expert = of_layer < 0 ? (*ids)(row, at) : (*ids)(first_row + row, of_layer, at);
            if (expert < 0) expert += n;  // as a list counts from its end
            if (expert < 0 || expert >= n) throw nb::index_error("list index out of range");
            ++counts[expert];
        }
}

// ------------------------------------------------------------------------------------------------------------------- DALI

/// Ask about the layer ahead, once per layer visit.
void TopPredicted::ask(const Routing &routing, std::vector<Question> &questions) {
    if (routing.mb) return;
    i64 last = routing.layer + lookahead;
    i64 first = ask_nearer && routing.layer == 0 ? 1 : last;
    for (i64 layer = first; layer <= last && layer < state->n_layers; ++layer) questions.push_back({int(layer), source, side});
}

/// Count predicted rows over the micro-batches so far; choose the top, at most `size` in all.
void TopPredicted::choose(const Predicted &prediction, Units &units) {
    int layer = prediction.layer, n = state->n_experts;
    if (step != prediction.step) {
        step = prediction.step;
        seen.clear();
    }
    auto &[counts, chosen] = seen[layer];
    counts.resize(n);
    prediction.add_rows(counts, state->top_k);
    std::vector<int> top;
    for (int expert = 0; expert < n; ++expert)
        if (counts[expert] > 0 && (over_all || !resident(unit(layer, expert)))) top.push_back(expert);
    size_t kept = size_t(std::min<i64>(size, i64(top.size())));
    std::partial_sort(top.begin(), top.begin() + kept, top.end(),
                      [&](int a, int b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    for (size_t i = 0; i < kept && i64(chosen.size()) < size; ++i) {
        if (resident(unit(layer, top[i])) || std::find(chosen.begin(), chosen.end(), top[i]) != chosen.end()) continue;
        chosen.push_back(top[i]);
        units.emplace_back(layer, top[i]);
    }
}

// --------------------------------------------------------------------------------------------------------------- HybriMoE

void ImpactDriven::start(const Setup &setup) {
    know(setup);
    timings = layer_timings(setup);
    rows.assign(state->n_layers, {});
}

/// Ask about the layers ahead, the next one last, once per layer visit.
void ImpactDriven::ask(const Routing &routing, std::vector<Question> &questions) {
    if (routing.step != step) {
        step = routing.step;
        for (auto &of_layer : rows) of_layer.clear();
    }
    layer = routing.layer;
    if (routing.mb) return;
    end_ns = link_ns = 0;
    for (int n = std::min(int(sources.size()), state->n_layers - 1 - layer); n > 0; --n)
        questions.push_back({layer + n, sources[n - 1], side});
}

/// Note when this layer and its transfers will have ended.
void ImpactDriven::ahead(const Routing &routing, const Plan &plan) {
    const Timings &costs = timings[layer];
    std::erase_if(under_way, [&](i64 one) {
        return !gpu->pending[one] || std::any_of(plan.gpu.begin(), plan.gpu.end(), [&](int e) { return unit(layer, e) == one; });
    });
    i64 link = queue().first;
    std::vector<i64> arrival(state->n_experts, -1);
    for (int expert : plan.gpu) {
        i64 one = unit(layer, expert), wait = remaining(one);
        if (!resident(one) && !(0 < wait && wait < costs.transfer)) continue;
        arrival[expert] = wait;
        link = std::max(link, wait);
    }
    algorithms::Ends ends = algorithms::replay(plan, routing.rows, costs, std::move(arrival), link);
    end_ns = std::max(end_ns, state->now + std::max(ends.gpu, ends.cpu));
    link_ns = std::max(link_ns, state->now + ends.link);
}

/// Find what is left of the prefetch in flight, and the time of those that are queued.
std::pair<i64, i64> ImpactDriven::queue() const {
    i64 flying = 0, queued = 0;
    for (i64 one : under_way) {
        i64 left = remaining(one);
        if (left < timings[one / state->n_experts].transfer) flying = std::max(flying, left);
        else queued += left;
    }
    return {flying, queued};
}

/// Count predicted rows; choose once the next layer's are in.
void ImpactDriven::choose(const Predicted &prediction, Units &units) {
    using algorithms::Budget;
    int next = prediction.layer;
    if (!prediction.mb || rows[next].empty()) rows[next].assign(state->n_experts, 0);
    prediction.add_rows(rows[next], state->top_k);
    if (next != layer + 1) return;
    std::erase_if(under_way, [&](i64 one) { return !gpu->pending[one]; });
    auto [flying, queued] = queue();
    i64 idle = end_ns - state->now - std::max(link_ns - state->now, flying) - queued, transfer = timings[next].transfer;
    if (budget != Budget::NONE && idle < (budget == Budget::ENDS ? transfer : 1)) return;
    std::vector<algorithms::Ahead> known;
    for (int one = next; one < std::min(next + int(sources.size()), state->n_layers); ++one)
        if (!rows[one].empty()) known.push_back(ahead_of(one));
    auto makespan_of = [&](i64 of_layer) {
        return [this, &costs = timings[of_layer]](const std::vector<i64> &cached, const std::vector<i64> &missing) {
            return algorithms::queue_makespan(cached, missing, costs, reading);
        };
    };
    for (auto [of_layer, expert] : algorithms::impact_driven(std::move(known), makespan_of, transfer, idle, budget, candidates)) {
        units.emplace_back(of_layer, expert);
        under_way.push_back(unit(of_layer, expert));
    }
}

/// Split the predicted rows of the experts of a layer by whether an expert is on a GPU or on its way.
algorithms::Ahead ImpactDriven::ahead_of(int of_layer) const {
    algorithms::Ahead found{of_layer, {}, {}};
    for (int expert = 0; expert < state->n_experts; ++expert) {
        i64 n = rows[of_layer][expert], one = unit(of_layer, expert);
        if (!n) continue;
        if (resident(one) || gpu->pending[one]) found.cached.push_back(n);
        else found.missing.emplace_back(n, -expert);
    }
    return found;
}

/// Make a part by its name; none: nothing is fetched ahead.
std::unique_ptr<Prefetch> make_prefetch(const PartOptions &options) {
    if (is(options, "name", "none")) return nullptr;
    std::unique_ptr<Prefetch> found;
    if (is(options, "name", "predicted")) {
        auto part = std::make_unique<TopPredicted>();
        part->size = number(options, "size");
        part->lookahead = number(options, "lookahead");
        part->transient = is(options, "pool", "transient");
        part->over_all = is(options, "over", "all");
        part->source = options["source"];
        part->ask_nearer = is(options, "nearer", "ask");
        found = std::move(part);
    } else if (is(options, "name", "impact-driven")) {
        using algorithms::Budget;
        auto part = std::make_unique<ImpactDriven>();
        nb::object listed(options["sources"]);
        Items sources(listed.ptr());
        for (Py_ssize_t i = 0; i < sources.size(); ++i) part->sources.push_back(nb::borrow(sources[i]));
        part->budget = is(options, "budget", "ends")     ? Budget::ENDS
                       : is(options, "budget", "begins") ? Budget::BEGINS
                                                         : Budget::NONE;
        part->candidates = number(options, "candidates");
        part->reading = reading_of(options);
        found = std::move(part);
    } else {
        throw std::logic_error("no prefetch part: " + text_of(options, "name"));
    }
    found->side = is(options, "lane", "side");
    return found;
}

}  // namespace moesim
