"""llama.cpp on a machine: what fits, how fast it is by ``--n-cpu-moe`` and context, and what would make it faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from moesim.errors import InputError
from moesim.experiment.runner import initial_placement
from moesim.fits import lacking, paging_note, required_bytes, sum_of
from moesim.hardware import read_profile
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import make_policy
from moesim.policies.systems.llama_cpp import divided, own_bytes
from moesim.policy import LAYER_PARTS
from moesim.studies.advice.candidates import gib
from moesim.studies.advice.question import DEFAULT_BITS, ENGINE, PLACE, PREFILL_CHUNK, Setting, is_open
from moesim.studies.identify.cases import Case, EngineSetting, decode_workload
from moesim.studies.identify.fit import Machine, Vector
from moesim.studies.identify.identify import Identified, Prediction
from moesim.studies.identify.model_error import shipped
from moesim.studies.identify.observations import observation, read_bits
from moesim.studies.identify.predictor import Memo, Predictor, engine_log_time

QUANTS: Final = ("Q8_0", DEFAULT_BITS, "Q2_K")
"""Quantisations that are compared where the model's file does not decide."""
UBATCHES: Final = (512, 1024, 2048)
TIMES: Final = (0.25, 1, 4)
"""Contexts of the table, over the one that was asked for."""
_ROWS: Final = 5
"""Settings of the table."""


@dataclass(frozen=True)
class Speed:
    """A speed in tokens/s with its interval of 90 %."""

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> Speed:
        """The seconds that a token takes."""
        return Speed(1 / self.value, 1 / self.high, 1 / self.low)

    def times(self, factor: float) -> Speed:
        """Multiply the speed."""
        return Speed(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Place:
    """A setting of llama.cpp: the layers whose experts, or which as a whole, are on the CPU."""

    whole: bool  # layers as a whole (``--n-gpu-layers``), else their experts (``--n-cpu-moe``)
    number: int  # of the option; in a machine without a GPU 0 layers are on it
    split: tuple[int, ...] = ()  # ``--tensor-split``: layers of each of several GPUs, the output counting as one

    @property
    def policy(self) -> dict[str, Any]:
        """Write it as the policy of an experiment."""
        number = {"n_gpu_layers" if self.whole else "n_cpu_moe": self.number}
        return {"name": "llama-cpp", **number} | ({"tensor_split": list(self.split)} if self.split else {})

    @property
    def title(self) -> str:
        """Write it as options."""
        split = f" -ts {','.join(map(str, self.split))}" if self.split else ""
        return (f"-ngl {self.number}" if self.whole else f"--n-cpu-moe {self.number}") + split


@dataclass(frozen=True)
class Point:
    """A setting with a context."""

    place: Place
    context: int  # tokens of each request in the KV cache
    decode: Speed  # of the whole batch when the context is full
    gpu_bytes: int  # most of one GPU: weights, KV cache, the runtime's context and compute buffer
    host_bytes: int
    misfit: str = ""  # why it does not fit; empty if it does


@dataclass(frozen=True)
class Gain:
    """Effect of a change of the machine or the bits."""

    change: str  # in words
    decode: float  # speed over that before
    prompt: float | None = None  # the same of prompts; None: not simulated
    place: Place | None = None  # the setting then, where it is another


@dataclass(frozen=True)
class Quant:
    """A quantisation of the model."""

    name: str
    n_bytes: int  # of the file
    point: Point | None  # its best setting; None: nothing fits
    misfit: str = ""
    paging: str = ""  # why pages of the file are read again from the disk; empty: all of it is in RAM


def _of_used_prompt(row: Prediction) -> bool:
    return row.case.observation.kind == "prefill" and row.status == "used"


class LlamaCpp:
    """llama.cpp with a model on a machine, which observed speeds may have identified."""

    def __init__(self, setting: Setting, found: Identified | None = None) -> None:
        self.setting = setting
        self.model = setting.model
        self.found = found
        if found is None:
            ref = setting.hardware_ref
            if "engine" not in ref:
                ref = {**ref, "engine": setting.asked.engine if "@" in setting.asked.engine else ENGINE}
            raw, path, _ = read_profile(ref, f"{PLACE}: --hardware")
            self.machine = Machine(raw, path or f"{PLACE}: --hardware")
        else:
            self.machine = found.predictor.machine
        self._logs = np.zeros(len(self.machine.constants)) if found is None else found.fit.logs
        # An identification leaves out constants that no row depends on: here all may change.
        self._whole = self.machine if found is None else Machine(self.machine.changed(self._logs.tolist()), self.machine.place)
        self._memory: dict[tuple[Any, ...], tuple[int, int, str]] = {}
        self.memo = Memo()
        self._of_prompts = None if found is None or not any(map(_of_used_prompt, found.predictions)) else found.posterior

    @property
    def first(self) -> int:
        """The least ``--n-cpu-moe`` that means anything: dense layers at the start count, too."""
        return self.model.positions[0]

    @property
    def last(self) -> int:
        """The ``--n-cpu-moe`` with which all experts are on the CPU."""
        return self.model.positions[-1] + 1

    def case(self, place: Place, context: int, prompt: int = 0) -> Case:
        """Describe decoding at a context, or a prompt, as an observation."""
        asked, has_gpu = self.setting.asked, self.setting.has_gpu
        shape: dict[str, Any] = {"kind": "prefill", "context": prompt} if prompt else {"context": context, "decode": 1}
        one = observation(
            {"row": f"{place.title}@{context}+{prompt}", "model": self.model.name, "setting": place.title, "value": 1.0,
             "unit": "tokens/s", "ubatch": PREFILL_CHUNK, "batch": asked.batch, **shape}
        )  # fmt: skip
        policy = place.policy | ({} if prompt else {"op_offload": False}) if has_gpu else {"name": "all-cpu"}
        read = EngineSetting(policy, {"ratio": 1.0}, "ngl" if place.whole else "n_cpu_moe")
        bits = f"{self.model.expert_bits:g}/{self.model.other_bits:g}"  # by which observed rows of the same model are known
        return Case(one, self.model, self.setting.model_ref, bits, read, not prompt, "")

    def place(self, number: int, context: int) -> Place:
        """Return ``--n-cpu-moe`` with layers divided among GPUs by their bytes."""
        gpus, model, batch = self.setting.gpus, self.model, self.setting.asked.batch
        if len(gpus) < 2:
            return Place(False, number)
        sizes = [0.0] * len(model.blocks)
        for layer, block in enumerate(model.positions):
            sizes[block] += sum(model.part_bytes(part, layer) for part in LAYER_PARTS)
            sizes[block] += model.kv_bytes(layer, context * batch, batch)
            sizes[block] += model.n_experts * model.expert_bytes(layer) if block >= number else 0
        sizes.append(model.head_bytes)
        room = [self.machine.base.devices[gpu].memory_bytes - self.machine.base.devices[gpu].workspace_bytes for gpu in gpus]
        staged = model.n_experts * max(model.expert_bytes(layer) for layer in range(model.n_layers)) if number > self.first else 0
        room[0] = max(1, room[0] - staged)  # experts of CPU layers are copied there for large batches
        ends = np.cumsum(sizes)
        at = divided(((end - size / 2) / ends[-1] for end, size in zip(ends, sizes, strict=True)), room)
        return Place(False, number, tuple(at.count(gpu) for gpu in range(len(gpus))))

    def memory(self, place: Place, context: int) -> tuple[int, int, str]:
        """Return the bytes on the fullest GPU and on the host, and why they do not fit; empty if they do."""
        key = (place, context)
        if key not in self._memory:
            self._memory[key] = self._needed(place, context)
        return self._memory[key]

    def _needed(self, place: Place, context: int) -> tuple[int, int, str]:
        setting, model, hardware = self.setting, self.model, self.machine.base
        case = self.case(place, context, prompt=PREFILL_CHUNK)  # with the buffers of a prompt
        policy: Any = make_policy(case.setting.policy)
        slots = dict.fromkeys(setting.gpus, model.n_layers * model.n_experts)
        workload = decode_workload(self.case(place, context))
        try:
            placement = initial_placement(model, CostModel(model, hardware, extrapolate=True), workload, policy, slots, {})
        except InputError as error:
            return 0, 0, str(error)
        needed = required_bytes(model, hardware, context * setting.asked.batch, placement, setting.asked.batch)
        room = {name: device.memory_bytes for name, device in hardware.devices.items()}
        room |= {setting.host: setting.ram_bytes, setting.gpu: setting.vram_bytes}
        total = {name: sum(parts.values()) for name, parts in needed.items()}
        why = ""
        if setting.one_memory and total[setting.gpu] + total[setting.host] > setting.ram_bytes:
            why = f"needs {gib(total[setting.gpu] + total[setting.host])} of {gib(setting.ram_bytes)} of memory"
        for name in dict.fromkeys((setting.host, *setting.gpus)):
            if total[name] > room[name] and not lacking(needed[name], room[name], placement):
                where = "RAM" if name == setting.host else name
                why = why or f"needs {gib(total[name])} of the {gib(room[name])} of {where}: {sum_of(needed[name])}"
        return max((total[name] for name in setting.gpus), default=0), total[setting.host], why

    def least(self, context: int) -> Place | None:
        """Find the setting with most on the GPU that fits; None if none does."""
        if not self.setting.has_gpu:
            return self._fitting([Place(True, 0)], context)
        if (found := self._fitting(self._by_experts(context), context)) is not None:
            return found
        n_layers = len(self.model.blocks)
        return self._fitting([Place(True, n) for n in range(n_layers + 1, -1, -1)], context)

    def _by_experts(self, context: int) -> list[Place]:
        return [self.place(n, context) for n in range(self.first, self.last + 1)]

    def _fitting(self, places: Sequence[Place], context: int) -> Place | None:
        """Find the first place that fits the GPU; None if that one does not fit the host."""
        found = self._on_gpu(places, context)
        return None if found is None or self.memory(found, context)[2] else found

    def _on_gpu(self, places: Sequence[Place], context: int) -> Place | None:
        """Find the first place that fits the GPU, by halving: of those that do, it needs least of the host."""

        def beyond(place: Place) -> bool:
            gpu, _, why = self.memory(place, context)
            return bool(why) and (gpu > self.setting.vram_bytes or any(name in why for name in self.setting.gpus))

        low, high = 0, len(places)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if beyond(places[middle]) else (low, middle)
        return places[low] if low < len(places) else None

    def misfit(self, context: int) -> str:
        """Return why nothing fits: of the setting with most on the GPU that it has room for, else with least."""
        if not self.setting.has_gpu:
            return self.memory(Place(True, 0), context)[2]
        place = self._on_gpu(self._by_experts(context), context) or self.place(self.last, context)
        return self.memory(place, context)[2]

    def paging(self, point: Point) -> str:
        """Describe pages of the mapped file that are read again from the disk; empty if the RAM has room for all."""
        lacks = point.host_bytes - self.setting.ram_bytes
        if lacks <= 0 or self.setting.one_memory:
            return ""
        return paging_note(self.model, "RAM", {"experts": point.host_bytes}, lacks)

    def points(self, places: Sequence[tuple[Place, int]]) -> list[Point]:
        """Predict settings with their contexts."""
        speeds = self.decode([self.case(place, context) for place, context in places])
        return [
            Point(place, context, speed, *self.memory(place, context))
            for (place, context), speed in zip(places, speeds, strict=True)
        ]

    def decode(self, cases: Sequence[Case]) -> list[Speed]:
        """Predict decode speeds of the whole batch, with intervals."""
        batch = self.setting.asked.batch
        if self.found is not None:
            mean, wide = self.found.posterior.at(Predictor(self.machine, cases, Memo()))
            ends = [(math.exp(-one), math.exp(one)) for one in wide]
        else:
            mean = self.times(cases)
            ends = [shipped().factors(self.machine.base, self.shares(row)) for row in self.slopes(cases)]
        speeds = [batch / math.exp(one) * 1e9 for one in mean]
        return [Speed(one, one * low, one * high) for one, (low, high) in zip(speeds, ends, strict=True)]

    def times(self, cases: Sequence[Case], change: Mapping[str, float] | None = None) -> Vector:
        """Return the logarithms of the cases' times, ns, with constants multiplied by the exponentials of a change."""
        machine, logs = self._whole, self._changed(change)
        if len(self.setting.gpus) > 1:  # the closed form is of one
            raw = machine.changed(logs.tolist())
            return np.array([self.memo.value(case, raw, machine.place) for case in cases])
        return Predictor(machine, cases, Memo()).values(logs)

    def _changed(self, change: Mapping[str, float] | None) -> Vector:
        """Return a change of constants' logarithms, as a vector."""
        return np.array([(change or {}).get(one.name, 0.0) for one in self._whole.constants])

    def slopes(self, cases: Sequence[Case]) -> list[dict[str, float]]:
        """Return the share of each case's time that goes with each constant; they add up to 1."""
        if len(self.setting.gpus) == 1 or not self.setting.has_gpu:
            found = Predictor(self._whole, cases, Memo()).slopes(np.zeros(len(self._whole.constants)))
        else:
            names = [one.name for one in self._whole.constants]
            middle, step = self.times(cases), 0.02
            found = np.zeros((len(cases), len(names)))
            for k, name in enumerate(names):
                if name in _SLOPES:
                    found[:, k] = (self.times(cases, {name: step}) - middle) / step
        rows = []
        for row in np.abs(found):
            whole = row.sum() or 1.0
            rows.append({one.name: share / whole for one, share in zip(self._whole.constants, row.tolist(), strict=True)})
        return rows

    @staticmethod
    def shares(slopes: Mapping[str, float]) -> dict[str, float]:
        """Divide a time among CPU and GPU, as the intervals of predictions do."""
        cpu = sum(share for name, share in slopes.items() if name.startswith("cpu_"))
        return {"cpu": cpu, "gpu": 1.0 - cpu, "copies": 0.0}

    def limits(self, place: Place, context: int) -> dict[str, float]:
        """Return the shares of a decode step's time by what takes it, largest first."""
        found: dict[str, float] = {}
        for name, share in self.slopes([self.case(place, context)])[0].items():
            words = next(words for start, words in _LIMITS.items() if name.startswith(start))
            found[words] = found.get(words, 0.0) + share
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def prompt(self, place: Place) -> Speed:
        """Simulate the prompts of the batch: tokens/s of all, with an interval."""
        asked = self.setting.asked
        if self._of_prompts is not None:
            new = Predictor(self.machine, [self.case(place, 0, prompt=asked.prompt)], self.memo)
            new.linearise(self._logs)
            [log_time], [wide] = self._of_prompts.at(new)
            low, high = math.exp(-wide), math.exp(wide)
        else:
            log_time = self._prompt_time(place)
            shares = self.shares(self.slopes([self.case(place, asked.prompt)])[0])
            low, high = shipped().factors(self.machine.base, shares, prompt=True)
        speed = asked.batch * asked.prompt / math.exp(log_time) * 1e9
        return Speed(speed, speed * low, speed * high)

    def _prompt_time(self, place: Place, change: Mapping[str, float] | None = None) -> float:
        """Return the logarithm of the simulated time of the prompts, ns, with constants multiplied as in `times`."""
        raw = self._whole.changed(self._changed(change).tolist())
        return engine_log_time(self.case(place, 0, prompt=self.setting.asked.prompt), raw, self.machine.place)

    @cached_property
    def best(self) -> Point | None:
        """The fastest setting at the context asked for; None if nothing fits."""
        place = self.least(self.setting.context)
        return None if place is None else self.points([(place, self.setting.context)])[0]

    def table(self) -> list[Point]:
        """Predict ``--n-cpu-moe`` by context: from the least that fits the shortest to all."""
        contexts = [max(1, round(times * self.setting.context)) for times in TIMES]
        found = [self.least(context) for context in contexts]
        edges = sorted({one.number for one in found if one is not None and not one.whole})
        if not edges or not self.setting.has_gpu:
            return [] if self.best is None else self.points([(self.best.place, c) for c in contexts if self.least(c)])
        numbers = {*edges, max(self.first, edges[0] - 1)} | ({self.last} if edges[-1] > self.first else set())
        for n in () if edges[0] == self.first else np.linspace(edges[0], self.last, _ROWS).round().astype(int).tolist():
            if len(numbers) < _ROWS:
                numbers.add(n)
        return self.points([(self.place(n, context), context) for n in sorted(numbers) for context in contexts])

    def with_setting(self, **changes: Any) -> LlamaCpp:
        """Return the same with another memory or model."""
        made = object.__new__(type(self))
        made.__dict__ = {key: value for key, value in self.__dict__.items() if key not in ("best",)}
        made.setting = replace(self.setting, **changes)
        made.model, made._memory = made.setting.model, {}
        return made

    def quants(self) -> list[Quant]:
        """Compare quantisations of a model whose file does not decide."""
        asked = self.setting.asked
        base = dict(asked.model) if isinstance(asked.model, Mapping) else {"base": str(asked.model)}
        if asked.gguf is not None or not is_open(plain := load_model(asked.model, PLACE)):
            return []
        found = []
        for name in dict.fromkeys((*QUANTS, self.setting.quant)):
            if not name:
                continue
            ref = base | read_bits(name, PLACE, plain)[0]
            model = load_model(ref, PLACE)
            other = self.with_setting(model=model, model_ref=ref, quant=name)
            why = "" if other.best is not None else other.misfit(self.setting.context)
            paging = "" if other.best is None else other.paging(other.best)
            found.append(Quant(name, file_bytes(model), other.best, why, paging))
        return sorted(found, key=lambda one: -one.n_bytes)

    def gains(self, *, prompts: bool = True) -> Iterator[Gain]:
        """Predict what upgrades of the machine give at the context asked for."""
        best = self.best
        assert best is not None
        case, names = self.case(best.place, best.context), {one.name for one in self._whole.constants}
        before = float(self.times([case])[0])
        prompt = self._prompt_time(best.place) if prompts else None
        most = 1.0
        upgrades = _OF_ONE_MEMORY if self.setting.one_memory else _UPGRADES
        for what, rates in upgrades.items():
            change = {name: math.log(factor) for name, factor in rates.items() if name in names}
            if not change or (what.startswith(("GPU", "PCIe")) and len(self.setting.gpus) != 1):
                continue  # constants are of one GPU
            decode = math.exp(before - float(self.times([case], change)[0]))
            faster = None if prompt is None else math.exp(prompt - self._prompt_time(best.place, change))
            if " and " in what and decode < 1.02 * most:
                continue  # together no more than one alone
            most = max(most, decode)
            yield Gain(what, decode, faster)
        if len(self.setting.gpus) == 1 and not self.setting.one_memory and best.place != Place(False, self.first):
            own = self.setting.vram_bytes
            more = next((size for size in _VRAM if size * 2**30 > 1.3 * own), None)
            kept = min((size * 2**30 - own for size in _VRAM if 0 <= size * 2**30 - own < 2**30), default=0)  # by a desktop
            if more is not None:
                other = self.with_setting(vram_bytes=more * 2**30 - kept)
                if other.best is not None:
                    faster = None if prompt is None else math.exp(prompt - other._prompt_time(other.best.place))
                    words = f"{more} GiB on the GPU, same speed"
                    yield Gain(words, other.best.decode.value / best.decode.value, faster, other.best.place)

    def more_ram(self) -> tuple[int, Point] | None:
        """Find the least larger memory of the host, GiB, with which the model fits, and its best setting then."""
        kept = min((size * 2**30 - self.setting.ram_bytes for size in _RAM if size * 2**30 >= self.setting.ram_bytes), default=0)
        for size in _RAM:
            if size * 2**30 > self.setting.ram_bytes + kept:
                other = self.with_setting(ram_bytes=size * 2**30 - kept)
                if (best := other.best) is not None and not other.paging(best):
                    return size, best
        return None

    def by_ubatch(self) -> list[tuple[int, int, Place | None]]:
        """Find the least setting that fits by context and ``-ub``: their compute buffers differ."""
        found = []
        backend = self.machine.base.machine.get("backend", "cuda")
        for times in TIMES:
            context = max(1, round(times * self.setting.context))
            for ubatch in UBATCHES:
                floor = self.machine.base.devices[self.setting.gpu].workspace_bytes
                sizes = [max(floor, own_bytes(self.model, rows, backend)) for rows in (UBATCHES[0], ubatch)]
                more = sizes[1] - sizes[0]
                other = self.with_setting(vram_bytes=self.setting.vram_bytes - more)
                found.append((context, ubatch, other.least(context)))
        return found


_SLOPES: Final = ("cpu_read_rate", "cpu_rate", "gpu_read_rate", "gpu_layer", "gpu_step", "switch")
"""Constants that decoding depends on most, which are varied one by one where no closed form is."""
_LIMITS: Final = {
    "cpu_read": "CPU memory", "cpu_few": "CPU compute", "cpu_many": "CPU compute", "cpu_rate": "CPU compute",
    "cpu": "CPU start-up", "gpu_read": "GPU memory", "gpu_rate": "GPU compute", "gpu": "GPU launches", "link": "link",
    "switch": "hand-over between CPU and GPU", "host": "host thread",
}  # fmt: skip
_UPGRADES: Final[Mapping[str, Mapping[str, float]]] = {
    "RAM 1.5 times as fast": {"cpu_read_rate": 1.5},
    "CPU 1.5 times as fast, same RAM": {"cpu_rate": 1.5, "cpu_few_row_rate": 1.5, "cpu_many_row_rate": 1.5},
    "RAM and CPU 1.5 times as fast": {
        "cpu_read_rate": 1.5,
        "cpu_rate": 1.5,
        "cpu_few_row_rate": 1.5,
        "cpu_many_row_rate": 1.5,
    },
    "GPU twice as fast, same memory": {"gpu_read_rate": 2.0, "gpu_rate": 2.0},
    "PCIe twice as fast": {"link_rate": 2.0},
}
_OF_ONE_MEMORY: Final[Mapping[str, Mapping[str, float]]] = {
    "memory 1.5 times as fast": {"cpu_read_rate": 1.5, "gpu_read_rate": 1.5},
    "GPU computes twice as fast": {"gpu_rate": 2.0},
}
_RAM: Final = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Memory of hosts that is sold, GiB."""
_VRAM: Final = (8, 12, 16, 24, 32, 48, 64, 80, 96, 141, 192)
"""Memory of GPUs that are sold, GiB."""


def file_bytes(model: ModelSpec) -> int:
    """Count the bytes of all weights."""
    return model.experts_bytes_total + model.non_expert_bytes
