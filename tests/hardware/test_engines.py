"""Engine profiles: what they replace on a machine, on which machines, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim import calibrate, compare, load_hardware, whatif
from moesim.cli.main import main
from moesim.errors import HardwareError
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.operations import operations
from moesim.hardware.engines import engine_profiles, load_engine, why_not
from moesim.hardware.load import hardware_names, read_profile
from moesim.hardware.load import load_hardware as read
from moesim.hardware.read import override
from moesim.model import load_model
from moesim.policies.registry import POLICIES, make_policy

PLAIN = "rtx3090-epyc7532"
FLAT = {"source": "assumed", "why": "a test"}


def number(value: float, **more: Any) -> dict[str, Any]:
    return {"value": value, **FLAT, **more}


ENGINE: dict[str, Any] = {
    "name": "mine", "description": "An engine of a test.", "checked": "today", "backends": ["cuda", "vulkan"], "experts": "rates",
    "builds": ["old"],
    "costs": [
        {
            "gpu": {"operations": "llama.cpp", "operation_us": number(2), "token_us": number(100)},
            "cpu": {"operations": "llama.cpp", "operation_us_a_thread": number(0.5, interval=[0.25, 1])},
            "to_gpu_us": number(11), "to_host_us": number(22),
        },
        {"when": {"backend": "cuda", "compute": {"from": 8.0, "below": 9.0}}, "gpu": {"operation_us": number(3)}},
        {"when": {"system": "windows"}, "cpu": {"operation_us": number(7)}},
        {"when": {"backend": "vulkan"}, "to_host_us": number(33)},
        {"when": {"build": "old"}, "gpu": {"token_us": number(900)}},
    ],
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> str:
    return written(tmp_path, ENGINE)


def written(folder: Path, engine: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(engine, sort_keys=False))
    return str(path)


def machine(tmp_path: Path, **words: str) -> str:
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump({"name": "box", "base": PLAIN, "machine": words, "description": "A test."}))
    return str(path)


def latencies(source: Any, engine: str) -> list[Fraction]:
    return [link.activation.latency_us for link in load_hardware(source, engine=engine).links if link.activation]


def test_software_of_the_machine_gives_way_and_the_machine_stays(mine: str):
    before, after = load_hardware(PLAIN), load_hardware(PLAIN, engine=mine)
    gpu, cpu = after.devices["gpu0"], after.devices["cpu0"]
    assert before.devices["gpu0"].launches and not gpu.launches and gpu.launch_us == gpu.router_us == 0
    assert (gpu.operations, gpu.operation_us, gpu.token_us) == ("llama.cpp", 3, 100)
    assert before.devices["gpu0"].experts and not gpu.experts  # "rates": by bytes and operations
    for name in ("memory_bytes", "memory_bytes_per_s", "flops", "workspace_bytes", "idle_w"):
        assert getattr(gpu, name) == getattr(before.devices["gpu0"], name)
    assert cpu.expert_cost == before.devices["cpu0"].expert_cost
    assert latencies(PLAIN, mine) == [11, 22]
    assert [link.curves for link in after.links] == [link.curves for link in before.links]
    assert after.numbers["devices.gpu0.operation_us"].ref == "a test"
    assert after.machine["engine"] == "mine (cuda, linux)"


@pytest.mark.parametrize(
    ("words", "operation", "wait", "back"),
    [
        ({}, 2, 8, 22),  # 16 threads, as none are stated
        ({"threads": "6"}, 2, 3, 22),
        ({"compute": "8.6", "threads": "6"}, 3, 3, 22),
        ({"compute": "9.0"}, 2, 8, 22),
        ({"compute": "8.0"}, 3, 8, 22),
        ({"system": "windows", "threads": "6"}, 2, 7, 22),  # a number replaces the law
        ({"backend": "vulkan", "compute": "8.6"}, 2, 8, 33),
    ],
)
def test_blocks_are_for_the_machines_that_they_name(
    tmp_path: Path, mine: str, words: dict[str, str], operation: int, wait: int, back: int
):
    box = machine(tmp_path, **words)
    found = load_hardware(box, engine=mine)
    assert (found.devices["gpu0"].operation_us, found.devices["cpu0"].operation_us) == (operation, wait)
    assert latencies(box, mine) == [11, back]


def test_a_number_for_each_thread_scales_with_its_interval(tmp_path: Path, mine: str):
    found = load_hardware(machine(tmp_path, threads="6"), engine=mine).numbers["devices.cpu0.operation_us"]
    assert (found.value, found.interval, found.ref) == (3, (1.5, 6), "6 threads: a test")


def test_a_build_has_numbers_of_its_own(mine: str):
    assert load_engine(f"{mine}@old", "test").name == "mine@old"
    assert load_hardware(PLAIN, engine=f"{mine}@old").devices["gpu0"].token_us == 900


def test_the_profile_s_own_engine_leaves_numbers_of_this_machine(tmp_path: Path, mine: str):
    own = {"devices": {"gpu0": {"first_extra_us": number(5), "operation_us": number(4)}}}
    path = tmp_path / "box.yaml"
    base = {"name": "box", "base": "ryzen7950x-rtx4080", "description": "A test.", **own}
    path.write_text(yaml.safe_dump({**base, "engine": mine}))
    kept, other = load_hardware(path), load_hardware(path, engine="llama.cpp")
    assert (kept.devices["gpu0"].operation_us, kept.devices["gpu0"].first_extra_us) == (4, 5)
    assert (float(other.devices["gpu0"].operation_us), other.devices["gpu0"].first_extra_us) == (1.72, None)
    assert load_hardware(path, engine="machine").devices["gpu0"].operation_us == 4


def test_a_profile_with_its_engine_s_numbers_is_written_and_read_again(tmp_path: Path):
    """What calibration writes: the numbers of the engine, some of them identified since."""
    raw, _, _ = read_profile("a10-xeon8358")
    changed = override(
        raw, {"devices.gpu0.operation_us": number(5), "links.cpu0->gpu0.activation.latency_us": number(70)}, "test"
    )
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in changed.items() if key != "anchors"}))
    before, after = load_hardware("a10-xeon8358"), load_hardware(path, engine="llama.cpp")
    assert after.devices["gpu0"].operation_us == 5 and after.devices["gpu0"].flops == before.devices["gpu0"].flops
    assert next(link.activation.latency_us for link in after.links if link.activation) == 70
    child = tmp_path / "child.yaml"
    child.write_text(yaml.safe_dump({"name": "child", "base": str(path), "description": "A test.", "machine": {"threads": "4"}}))
    assert load_hardware(child).devices == after.devices


def test_overrides_come_after_the_engine(mine: str):
    found = load_hardware({"base": PLAIN, "engine": mine, "devices.gpu0.operation_us": 9})
    assert (found.devices["gpu0"].operation_us, found.devices["gpu0"].token_us) == (9, 100)


def test_eager_is_the_software_that_the_papers_profile_has():
    """Two ways to write one thing: the profile of a paper's machine, and the engine profile."""
    one, two = load_hardware(PLAIN), load_hardware(PLAIN, engine="eager")
    assert one.devices == two.devices
    assert one.links == two.links


def test_every_shipped_engine_costs_every_shipped_machine_that_it_runs_on():
    pairs = 0
    for name in hardware_names():
        plain = load_hardware(name)
        for engine in engine_profiles():
            if why_not(engine.name, plain) is None:
                found = load_hardware(name, engine=engine.name)
                assert found.machine["engine"].startswith(engine.name) and found.devices.keys() == plain.devices.keys()
                pairs += 1
    assert pairs > 100


def test_every_number_of_an_assumed_kind_has_its_range():
    """Where nothing was measured, a range with a reason."""
    for engine in engine_profiles():
        for block in engine.costs:
            for part in (block, block.gpu, block.cpu):
                for key, one in part:
                    if getattr(one, "source", "") == "assumed":
                        assert one.interval is not None, (engine.name, key)


def test_named_policies_have_engines_that_are_known():
    engines = {name: getattr(make_policy(name), "engine", "") for name in POLICIES if name != "composed"}
    for engine in set(engines.values()) - {""}:
        load_engine(engine, "test")
    assert engines["llama-cpp"] == engines["two-uploads-lru"] == "llama.cpp"
    assert engines["kt-expert"] == "ktransformers" and engines["dali"] == engines["llama-cpp-in-dali"] == ""


def test_each_policy_has_its_own_engine_unless_one_is_named():
    def speeds(engine: str) -> dict[str, float]:
        table = compare(
            ["llama-cpp", "lru"], cache=0.25, prompt=4, decode=2, trace="mini-mixtral", engine=engine, jobs=1, progress=False
        ).table
        return dict(zip(table["policy_name"], table["decode_tokens_per_s"], strict=True))

    own, machines, llama = speeds("own"), speeds("machine"), speeds("llama.cpp")
    assert own["llama-cpp"] == llama["llama-cpp"] > machines["llama-cpp"]
    assert own["lru"] == machines["lru"] != llama["lru"]


def test_a_sweep_of_engines_is_a_column(capsys: pytest.CaptureFixture[str]):
    options = ["--policies", "lru", "--cache", "0.25", "--prompt", "4", "--decode", "2", "--trace", "mini-mixtral"]
    assert main(["compare", *options, "--engine", "machine,llama.cpp"]) == 0
    out = capsys.readouterr().out
    assert out.split()[0] == "engine" and "costs of llama.cpp (cuda linux)" in out


BAD: dict[str, tuple[Any, str]] = {
    "backend": (ENGINE | {"backends": ["rocm"]}, "backends.0: expected 'cuda', 'hip', "),
    "unknown key": (ENGINE | {"speed": 3}, "known: name, aliases, description, checked, backends"),
    "unknown number": (ENGINE | {"costs": [{"gpu": {"operatoin_us": number(3)}}]}, "did you mean 'operation_us'?"),
    "a list": ([ENGINE], "expected a mapping with name, backends and costs, got list"),
    "no source": (ENGINE | {"costs": [{"gpu": {"token_us": {"value": 3}}}]}, "costs.0.gpu.token_us.source: expected this key"),
    "negative": (ENGINE | {"costs": [{"to_gpu_us": number(-1)}]}, "costs.0.to_gpu_us.value: expected a number of at least 0"),
    "too long": (ENGINE | {"costs": [{"to_gpu_us": number(1e30)}]}, "costs.0.to_gpu_us.value: expected at most"),
    "no blocks": (ENGINE | {"costs": []}, "costs: expected at least 1, got []"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_engine_profile_is_one_line(tmp_path: Path, case: str):
    engine, said = BAD[case]
    with pytest.raises(HardwareError) as failure:
        load_hardware(PLAIN, engine=written(tmp_path, engine))
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_waits_of_threads_and_their_wake_up_are_both_charged():
    """A group of experts on the CPU: the waits of its operations, and the pool's wake-up once."""
    model = load_model({"base": "qwen3-30b-a3b", "expert_bits": 4})
    profile = load_hardware(PLAIN, engine="llama.cpp")
    cpu = profile.devices["cpu0"]
    waits = operations("llama.cpp", "cpu", model)["experts"]
    assert cpu.operation_us == Fraction("2.24") and cpu.wake_us == 12  # 16 threads
    assert CostModel(model, profile).first_extra_ns("cpu0") == waits * 2240 + 12000


def test_an_engine_of_a_mapping_is_that_of_every_policy():
    def speed(**given: Any) -> float:
        found = compare(
            ["lru"], cache=0.25, prompt=4, decode=2, trace="mini-mixtral", jobs=1, progress=False, **given
        )  # fmt: skip
        return float(found.table["decode_tokens_per_s"][0])

    named = speed(hardware={"base": PLAIN, "engine": "llama.cpp"})
    assert named == speed(hardware=PLAIN, engine="llama.cpp") > speed(hardware=PLAIN)
    with pytest.raises(HardwareError, match="expected the name of an engine such as"):
        speed(hardware={"base": PLAIN, "engine": 5})


def test_what_if_varies_the_machine_with_its_engine(tmp_path: Path):
    path = tmp_path / "one.yaml"
    one = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4},
        "hardware": PLAIN,
        "trace": "mini-mixtral",
        "cache": {"ratio": 0.25},
        "policies": ["llama-cpp"],
    }
    path.write_text(yaml.safe_dump({**one, "workload": {"prompt_tokens": 8, "decode_tokens": 2}}))
    found = whatif(path, ["gpu.compute x1.0001"], look=False, jobs=1, progress=False).table
    speeds = found["decode_tokens_per_s"].astype(float)
    assert speeds.max() / speeds.min() < 1.001


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "number without a source": ({"devices": {"gpu0": {"flops": 71e12}}}, "devices.gpu0.flops: expected {value: ..."),
    "text": (
        {"devices": {"gpu0": {"flops": {"value": "71 TFLOP/s", **FLAT}}}},
        "devices.gpu0.flops.value: expected a number of operations",
    ),
    "words": ({"machine": [1]}, "machine: expected a mapping"),
    "link": ({"links": {"cpu0->gpu0": {"pinned": 5}}}, "links.cpu0->gpu0.pinned: expected a mapping"),
    "threads": ({"machine": {"threads": "1.5"}}, "machine.threads: expected a number in quotes, from 0 to 1e+06, got '1.5'"),
    "many threads": (
        {"machine": {"threads": "10000000"}},
        "machine.threads: expected a number in quotes, from 0 to 1e+06, got '10000000'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_profile_with_an_engine_is_one_line(tmp_path: Path, case: str):
    changes, said = BROKEN[case]
    raw, _, _ = read_profile(PLAIN)
    raw = {key: value for key, value in raw.items() if key != "anchors"}
    for key, value in changes.items():
        raw[key] = value if key == "machine" else {**raw[key], **{k: {**raw[key][k], **v} for k, v in value.items()}}
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(HardwareError) as failure:
        load_hardware(path, engine="llama.cpp")
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_an_override_of_replaced_software_is_not_lost_in_silence(mine: str):
    launch = {"base": PLAIN, "devices.gpu0.launch_us": 1}
    with pytest.raises(
        HardwareError, match=r"devices\.gpu0\.launch_us: expected a number that mine has, got one of other software"
    ):
        load_hardware(launch, engine=mine)
    latent = load_hardware({"base": PLAIN, "devices.gpu0.latent_attention_us": 50}, engine=mine)
    assert latent.devices["gpu0"].latent_attention_us == 50  # what adds to an engine's numbers
    assert load_hardware(launch, engine="machine").devices["gpu0"].launch_us == 1
    assert load_hardware(launch, engine="eager").devices["gpu0"].launch_us == 1


@pytest.mark.parametrize(
    ("engine", "words", "said"),
    [
        ("lama.cpp", {}, "unknown engine 'lama.cpp'; did you mean 'llama.cpp'?"),
        ("llama.cpp@2020", {}, "unknown build of llama.cpp '2020'"),
        (
            "vllm",
            {"backend": "vulkan"},
            "one that runs on vulkan, as the machine does, got vllm, which runs on cuda, hip",
        ),
        ("exllamav3", {"backend": "hip"}, "got exllamav3, which runs on cuda"),
        ("llama.cpp", {"backend": "opencl"}, "machine.backend: unknown backend 'opencl'"),
        ("llama.cpp", {"system": "dos"}, "machine.system: unknown system 'dos'"),
        ("llama.cpp", {"compute": "ada"}, "machine.compute: expected a number in quotes, from 1 to 30, got 'ada'"),
        ("llama.cpp", {"compute": "86"}, "machine.compute: expected a number in quotes, from 1 to 30, got '86'"),
        ("no/such.yaml", {}, "no/such.yaml: expected an engine profile"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_name(tmp_path: Path, engine: str, words: dict[str, str], said: str):
    with pytest.raises(HardwareError) as failure:
        load_hardware(machine(tmp_path, **words), engine=engine)
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_a_cpu_alone_has_no_engine_of_gpus():
    with pytest.raises(HardwareError, match="expected one that runs on cpu, as the machine does, got vllm"):
        load_hardware("ryzen5900x", engine="vllm")
    assert load_hardware("ryzen5900x", engine="llama.cpp").devices["cpu0"].operation_us == Fraction("1.68")


def test_another_name_of_an_engine_is_that_engine(tmp_path: Path):
    """A machine that names ik_llama.cpp keeps its own numbers under a policy of llama.cpp."""
    path = tmp_path / "box.yaml"
    own = {"gpu0": {"operation_us": number(4)}}
    path.write_text(
        yaml.safe_dump(
            {"name": "box", "base": "ryzen7950x-rtx4080", "description": "A test.", "engine": "ik_llama.cpp", "devices": own}
        )
    )
    assert load_hardware(path, engine="llama.cpp").devices["gpu0"].operation_us == 4


def test_kernels_of_more_rows_are_a_curve_by_rows_that_ends_at_its_last_point():
    model = load_model({"base": "qwen3-30b-a3b", "expert_bits": 4})
    table = CostModel(model, load_hardware(PLAIN, engine="llama.cpp")).more_rows_table("gpu0")
    assert table[:3] == [0, 0, 213_000] and table[9] == 221_500 and len(table) == 33 and table[-1] == 335_000
    assert CostModel(model, load_hardware(PLAIN)).more_rows_table("gpu0") == []


def test_kernels_read_at_a_share_of_a_stream_and_ranges_add_up_as_squares(tmp_path: Path):
    path, engine = tmp_path / "box.yaml", tmp_path / "mine.yaml"
    rate = {**number(800e9), "interval": [700e9, 900e9]}
    path.write_text(
        yaml.safe_dump(
            {"name": "box", "base": PLAIN, "description": "A test.", "devices": {"gpu0": {"memory_bytes_per_s": rate}}}
        )
    )
    share = {"source": "derived", "how": "a test", "value": 0.5, "interval": [0.4, 0.8]}
    engine.write_text(yaml.safe_dump(ENGINE | {"costs": [{"gpu": {"read_share": share}}]}))
    got = load_hardware(path, engine=str(engine)).numbers["devices.gpu0.memory_bytes_per_s"]
    assert got.value == 400e9 and got.source == "assumed" and got.interval is not None
    low, high = (
        400e9 / math.exp(math.hypot(math.log(8 / 7), math.log(5 / 4))),
        400e9 * math.exp(math.hypot(math.log(9 / 8), math.log(8 / 5))),
    )
    assert got.interval == pytest.approx((low, high), rel=1e-5)


def test_an_engine_that_a_machine_was_not_identified_with_is_refused(tmp_path: Path):
    calibrate("experiments/calibrate/rtx2070super.csv", "rtx2070s-i5-12400f", out=tmp_path / "mine", progress=False)
    path = next((tmp_path / "mine").glob("*.yaml"))
    setting: dict[str, Any] = {"model": {"base": "mixtral-8x7b", "expert_bits": 2}, "cache": 0.1, "trace": "mini-mixtral"}
    setting |= {"prompt": 4, "decode": 2, "jobs": 1, "progress": False}
    compare(["llama-cpp", "lru"], hardware=str(path), engine="llama-cpp", **setting)
    for hardware, engine in ((str(path), "vllm"), ({"base": str(path), "engine": "eager"}, "own")):
        with pytest.raises(HardwareError, match=r"expected llama\.cpp .*, with which this machine was identified, got "):
            compare(["lru"], hardware=hardware, engine=engine, **setting)


@pytest.mark.parametrize(
    "command",
    [
        ["whatif", "experiments/quickstart.yaml", "--quick", "--set", "hardware=ryzen5900x"],
        ["calibrate", "experiments/calibrate/rtx2070super.csv", "--hardware", "ryzen5900x"],
    ],
)
def test_other_commands_take_an_engine(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*command, "--engine", "vllm"]) == 2
    assert "expected one that runs on cpu, as the machine does, got vllm" in capsys.readouterr().err


def test_an_engine_s_share_replaces_what_another_software_reached_and_not_what_was_measured(tmp_path: Path):
    """rtx3090-epyc7532 has module moves of PyTorch as pageable copies."""

    def pageable() -> float:
        path = tmp_path / "box.yaml"
        rate = {"latency_us": number(10), "bytes_per_s": number(5e9)}
        link = {"cpu0->gpu0": {"pageable": rate}}
        path.write_text(yaml.safe_dump({"name": "box", "base": PLAIN, "description": "A test.", "links": link}))
        found = load_hardware(path, engine="llama.cpp")
        return next(one for one in found.links if one.name == "cpu0->gpu0").curves["pageable"].bytes_per_s

    pinned = next(one for one in load_hardware(PLAIN).links if one.name == "cpu0->gpu0").curves["pinned"].bytes_per_s
    assert pageable() == pytest.approx(0.62 * pinned)
    before, after = (
        {one.name: one.curves["pageable"] for one in load_hardware("zen4-2core", engine=engine).links if "pageable" in one.curves}
        for engine in (None, "llama.cpp")
    )
    assert before == after != {}


def test_recommend_takes_no_yardstick(capsys: pytest.CaptureFixture[str]):
    asked = ["recommend", "--model", "mixtral-8x7b", "--hardware"]
    assert main([*asked, "{base: ryzen7950x-rtx4080, engine: none}"]) == 2
    assert "expected an engine that people run, got none" in capsys.readouterr().err
    assert main([*asked, "ryzen7950x-rtx4080", "--engine", "none"]) == 2
    assert "unknown engine 'none'; known: exllamav3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "machine", [{"base": "RTX 3060 + Ryzen 7 5700X + 64GB DDR4-3200"}, {"parts": {"gpu": "RTX 3060", "cpu": "Ryzen 7 5700X"}}]
)
def test_a_number_that_is_typed_next_to_parts_replaces_the_engine_s(machine: dict[str, Any]):
    typed = read({**machine, "host_us.plan": number(7), "devices.gpu0.operation_us": number(2.5)}, "x", "llama.cpp")
    assert (typed.host_us["plan"], typed.devices["gpu0"].operation_us) == (7, 2.5)
