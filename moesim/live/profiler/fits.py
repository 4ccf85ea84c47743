"""Curves from samples: medians, and three forms fitted to them by relative least squares.

A frame of samples has one row a measured time, with the columns of `COLUMNS`. ``subject`` is a shape such as ``4096x14336`` or
the name of a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from moesim.errors import InputError
from moesim.model import bits_to_bytes, builtin_models

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CURVE = ("kind", "device", "subject", "bits", "threads", "variant")  # columns that say which curve a sample is of

COLUMNS = (*CURVE, "size", "unit", "repeat", "order", "time_us")  # columns of a frame of samples

NOT_CURVES = ("sentinel", "power", "pair")  # kinds of samples whose time is no function of a size

FORMS = {"linear": 2, "flat_linear": 3, "roofline": 3}
"""Forms, and the sizes that each needs at least: as many as it has parameters."""

_TIE = 1e-3  # of the time: no reason to prefer a form with more parameters
_TEXTS = ("kind", "device", "subject", "variant", "unit")


class Fit(NamedTuple):
    """Parameters of one form; see `fit_all` for what they mean."""

    base_us: float
    slope_us: float
    knee: float


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """Summarise each probe: median, quartiles, and ``spread``, their distance over the median."""
    clean = _checked(samples)
    keys = [*CURVE, "unit", "size"]
    grouped = clean.groupby(keys, dropna=False, sort=True)["time_us"]
    table = grouped.quantile(0.5).rename("median_us").to_frame()
    table["q25_us"], table["q75_us"], table["n"] = grouped.quantile(0.25), grouped.quantile(0.75), grouped.size()
    table["spread"] = (table["q75_us"] - table["q25_us"]) / table["median_us"]
    return table.reset_index()[[*CURVE, "size", "unit", "n", "median_us", "q25_us", "q75_us", "spread"]]


def _checked(samples: pd.DataFrame) -> pd.DataFrame:
    missing = [name for name in COLUMNS if name not in samples and name not in ("repeat", "order")]
    if missing:
        raise InputError(f"samples: expected the columns {', '.join(COLUMNS)}, got no {', '.join(missing)}; measure again")
    clean = samples.copy()
    for name in _TEXTS:  # an empty cell of a CSV file comes back as a missing number
        clean[name] = clean[name].astype(object).where(clean[name].notna(), "").astype(str)
    timed = ~clean["kind"].isin(NOT_CURVES)
    for name, least in (("bits", "above 0"), ("threads", "above 0"), ("size", "of at least 0"), ("time_us", "above 0")):
        numbers = pd.to_numeric(clean[name], errors="coerce").astype("float64")
        right = np.isfinite(numbers) & ((numbers >= 0) if name == "size" else (numbers > 0))
        if name in ("bits", "threads"):
            right |= clean[name].isna()  # a copy has none
        elif name == "time_us":
            right |= ~timed & np.isfinite(numbers)  # a power may be 0
        if not right.all():
            row = int(np.flatnonzero(~right)[0])
            where, got = f"samples: row {row + 1}: {name}", clean[name].iloc[row]
            raise InputError(f"{where}: expected a number {least}, got {got}; remove the row or measure again")
        clean[name] = numbers
    return clean


def curves(table: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Split a table of `medians` or `fit_all` by curve: values of the columns `CURVE`, rows."""
    for key, rows in table.groupby(list(CURVE), dropna=False, sort=True):
        yield dict(zip(CURVE, key, strict=True)), rows


def fit_all(samples: pd.DataFrame) -> pd.DataFrame:
    """Fit every form to every curve, by least squares of relative residuals; a row a pair."""
    # "linear": base + slope n; "flat_linear": base + slope max(0, n - knee); "roofline": base, the
    # start-up, + slope max(knee, n). No parameter is negative; "bytes_per_s" and "flops" are the same
    # as rates. "best" marks the smallest "worst_relative", and of forms within 0.1 % the first in
    # FORMS. The knee is the best of all sizes and of the crossings of both parts between sizes. Copies
    # have no "roofline"; samples of NOT_CURVES are left out.
    table = medians(samples)
    rows: list[dict[str, Any]] = []
    for key, points in curves(table[~table["kind"].isin(NOT_CURVES)]):
        rows += _fit_curve(key, points)
    return pd.DataFrame(rows, columns=[
        *CURVE, "unit", "form", "base_us", "slope_us", "knee", "bytes_per_s", "flops", "n_points", "first", "last",
        "r2", "worst_relative", "worst_relative_at", "worst_us", "worst_us_at", "spread", "best", "note",
    ])  # fmt: skip


def _fit_curve(key: dict[str, Any], points: pd.DataFrame) -> list[dict[str, Any]]:
    units = sorted(points["unit"].unique())
    if len(units) > 1:
        raise InputError(f"samples: {describe(key)}: expected sizes in one unit, got {' and '.join(units)}; correct the unit")
    sizes, times = (points[name].to_numpy(np.float64) for name in ("size", "median_us"))
    common = {
        **key, "unit": units[0], "n_points": len(sizes), "first": sizes[0], "last": sizes[-1],
        "spread": float(points["spread"].median()), "best": False, "note": "",
    }  # fmt: skip
    rows = []
    for form, needed in FORMS.items():
        if form == "roofline" and units[0] == "bytes":
            continue
        row: dict[str, Any] = {**common, "form": form}
        if len(sizes) < needed:
            row["note"] = f"needs {needed} sizes, got {len(sizes)}"
        else:
            fit = fit_form(form, sizes, times)
            row |= fit._asdict() | _rates(form, fit, row) | _residuals(sizes, times, fitted_us(form, fit, sizes))
        rows.append(row)
    fitted = [row for row in rows if not row["note"]]
    if fitted:
        least = min(row["worst_relative"] for row in fitted)
        next(row for row in fitted if row["worst_relative"] <= least + _TIE)["best"] = True
    return rows


def pair_rates(samples: pd.DataFrame) -> pd.DataFrame:
    """Compute an activity's share of its speed in a pair: median time alone over together."""
    rows = []
    for (activity, beside), some in medians(samples[samples["kind"] == "pair"]).groupby(["device", "subject"], sort=True):
        found = {row["variant"]: row for row in some.to_dict("records")}
        if {"alone", "together"} <= set(found):
            together = found["together"]
            rows.append(
                [activity, beside, found["alone"]["median_us"] / together["median_us"], together["n"], together["spread"]]
            )
    return pd.DataFrame(rows, columns=["activity", "beside", "rate", "n", "spread"])


def describe(curve: Mapping[str, Any]) -> str:
    """Name a curve in words, such as ``expert, cpu0, 4096x14336, 4 bits, 2 threads``."""
    words = [str(curve[name]) for name in ("kind", "device", "subject") if curve[name]]
    for name, one in (("bits", "bit"), ("threads", "thread")):
        if not pd.isna(curve[name]):
            words.append(f"{curve[name]:g} {one}{'' if curve[name] == 1 else 's'}")
    return ", ".join([*words, *([str(curve["variant"])] if curve["variant"] else [])])


def fitted_us(form: str, fit: Fit, sizes: Floats) -> Floats:
    """Evaluate a form at sizes, us, same shape."""
    return fit.base_us + fit.slope_us * _beyond(form, fit.knee, sizes)


def _beyond(form: str, knee: float, sizes: Floats) -> Floats:
    if form == "linear":
        return sizes
    found: Floats = np.maximum(knee, sizes) if form == "roofline" else np.maximum(0.0, sizes - knee)
    return found


def fit_form(form: str, sizes: Floats, times: Floats) -> Fit:
    """Fit one form by least squares of the relative residuals, with no negative parameter."""
    best, least = Fit(math.nan, math.nan, math.nan), math.inf
    for knee in [0.0] if form == "linear" else _knees(sizes, times, whole=form == "flat_linear"):
        basis = np.stack([np.ones_like(sizes), _beyond(form, knee, sizes)], axis=1) / times[:, None]
        scale = np.linalg.norm(basis, axis=0)
        scale[scale == 0] = 1.0
        (base, slope), distance = nnls(basis / scale, np.ones_like(times))
        if distance < least:
            best, least = Fit(float(base / scale[0]), float(slope / scale[1]), knee), float(distance)
    return best


def _knees(sizes: Floats, times: Floats, *, whole: bool) -> list[float]:
    """List where the best knee may lie: at a size, or where the best flat part and line cross."""
    found = set(sizes.tolist())
    weights = times**-2
    for split in range(1, len(sizes)):
        low, high = slice(0, split), slice(split, None)
        flat = float(np.average(times[low], weights=weights[low]))
        through_zero = float((weights * sizes * times)[high].sum() / (weights * sizes**2)[high].sum())
        crossings = [flat / through_zero]  # the roofline without a start-up
        if len(sizes) - split >= 2:
            middle, level = (float(np.average(values[high], weights=weights[high])) for values in (sizes, times))
            away = weights[high] * (sizes[high] - middle)
            slope = float((away * (times[high] - level)).sum() / (away * (sizes[high] - middle)).sum())
            crossings += [middle + (flat - level) / slope] if slope > 0 else []
        for knee in crossings:
            if sizes[split - 1] <= knee <= sizes[split]:
                found |= {float(math.floor(knee)), float(math.ceil(knee))} if whole else {knee}
    return sorted(found)


def _residuals(sizes: Floats, times: Floats, fitted: Floats) -> dict[str, float]:
    distance = np.abs(fitted - times)
    relative, total = distance / times, float(((times - times.mean()) ** 2).sum())
    return {
        "r2": 1 - float((distance**2).sum()) / total if total else math.nan,
        "worst_relative": float(relative.max()), "worst_relative_at": float(sizes[relative.argmax()]),
        "worst_us": float(distance.max()), "worst_us_at": float(sizes[distance.argmax()]),
    }  # fmt: skip


def _rates(form: str, fit: Fit, row: Mapping[str, Any]) -> dict[str, float]:
    if form == "linear" and row["unit"] == "bytes" and fit.slope_us > 0:
        return {"bytes_per_s": 1e6 / fit.slope_us}
    weights = _weights(row) if form == "roofline" else None
    if weights is None or not fit.slope_us:
        return {}
    n_bytes, params = weights
    rates = {"bytes_per_s": n_bytes / (fit.slope_us * fit.knee) * 1e6} if fit.knee > row["first"] else {}
    return rates | ({"flops": 2e6 * params / fit.slope_us} if fit.knee < row["last"] else {})


def _weights(row: Mapping[str, Any]) -> tuple[int, int] | None:
    if row["kind"] not in ("expert", "expert_first") or pd.isna(row["bits"]):
        return None
    shape = re.match(r"(\d+)x(\d+)", row["subject"])
    if shape:
        params = 3 * int(shape[1]) * int(shape[2])
    elif row["subject"] in builtin_models():
        params = builtin_models()[row["subject"]].expert_params
    else:
        return None
    return bits_to_bytes(params, row["bits"]), params
