"""Several GPUs and several hosts.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any

from moesim.policy import Copy, Fetch, Run, Send
from tests.engine.engine_kit import (
    ALL,
    ONE,
    POOLS,
    Script,
    cpu,
    crossings,
    gpu,
    link,
    machine,
    on_gpu,
    play,
    tasks,
    transfers,
    two_gpus,
)


def test_several_gpus_share_a_layer() -> None:
    # gpu0->gpu1 |     |i
    # gpu0       |DDDDD|00000|
    # gpu1       |      |11111|       resident there
    # gpu1->gpu0 |            |o      the layer ends at 240
    toy = two_gpus(**{n: link() for n in ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0", "gpu0->gpu1", "gpu1->gpu0")})
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "gpu1")]}
    records = play(Script(script, copies=[*ALL, Copy(0, [1], "gpu1")], pools=POOLS, routed=on_gpu), ONE, toy)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E0x1"), (120, 220, "gpu1", "E1x1")]
    assert crossings(records) == [(100, 120, "gpu0->gpu1", "in", 1), (220, 240, "gpu1->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 240), (240, 540)]
    assert records.lookups[0].hits == (1, 1)


def _two_hosts() -> Any:
    eth = link(0.5, 50, medium="eth", act_bytes_per_ns=0.5, act_latency_ns=50)
    links = {
        "cpu0->gpu0": link(),
        "gpu0->cpu0": link(),
        "cpu1->gpu1": link(),
        "gpu1->cpu1": link(),
        "cpu0->cpu1": eth,
        "cpu1->cpu0": eth,
    }
    devices = {"gpu0": gpu(), "cpu0": cpu(), "gpu1": gpu(host="host1"), "cpu1": cpu(host="host1")}
    return machine(devices, links, backing=("cpu0", "cpu1"))


def test_several_hosts_over_a_network() -> None:
    # in:  gpu0->cpu0 100-120, cpu0->cpu1 (50 + 20) 120-190, cpu1->gpu1 190-210
    # gpu1 loads 1 from its own host: cpu1->gpu1 100-1100, and runs it 1100-1200; out: 1200-1220-1290-1310
    script = {("Routed", 0, 0, 0): [Fetch(0, [1], "gpu1"), Run(0, [0], "gpu0"), Run(0, [1], "gpu1")]}
    records = play(Script(script, copies=ALL, pools=POOLS, routed=on_gpu), ONE, _two_hosts())
    assert transfers(records) == [(100, 1100, "cpu1->gpu1", "demand 0/1")]
    assert crossings(records) == [
        (100, 120, "gpu0->cpu0", "in", 1), (120, 190, "cpu0->cpu1", "in", 1), (190, 210, "cpu1->gpu1", "in", 1),
        (1200, 1220, "gpu1->cpu1", "out", 1), (1220, 1290, "cpu1->cpu0", "out", 1), (1290, 1310, "cpu0->gpu0", "out", 1),
    ]  # fmt: skip
    assert records.layers[0].end == 1310


def test_several_hosts_messages_over_one_network_card_are_serial() -> None:
    # eth: 100 bytes 0 -> 1: 50 + 200 = 250; then 100 bytes back.
    script = Script(
        {("LayerBegin", 0, 0): [Send(100, "cpu0", "cpu1", "there"), Send(100, "cpu1", "cpu0", "back")]},
        copies=ALL, routed=on_gpu, hear=["Sent"],
    )  # fmt: skip
    records = play(script, ONE, _two_hosts())
    assert [t[:3] for t in transfers(records)] == [(0, 250, "cpu0->cpu1"), (250, 500, "cpu1->cpu0")]
    assert [(now, key) for now, key in script.log if key[0] == "Sent"] == [(250, ("Sent", "there")), (500, ("Sent", "back"))]
