"""Rule 3: the parts of a layer, and micro-batches.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from moesim.policy import Run
from tests.engine.engine_kit import ALL, ONE, Script, cpu, crossings, gpu, machine, on_gpu, play, tasks, tiny_model, workload


def test_rule_3_attention_and_dense_part_on_different_devices() -> None:
    # gpu0       |       |        |DD|00000|11111|DDDDD...
    # cpu0       | AAAAAA|        |                           attention of layer 0: 120
    # gpu0->cpu0 |h      |
    # cpu0->gpu0 |       |h                                   the hidden state crosses: 20 each way
    #            0  20  140 160  200   300   400   500
    records = play(Script(copies=ALL, parts={("attention", 0): "cpu0"}, routed=on_gpu), ONE)
    assert tasks(records)[:5] == [
        (20, 140, "cpu0", "attention"), (160, 200, "gpu0", "dense"), (200, 300, "gpu0", "E0x1"),
        (300, 400, "gpu0", "E1x1"), (400, 500, "gpu0", "dense"),
    ]  # fmt: skip
    assert crossings(records) == [(0, 20, "gpu0->cpu0", "hidden", 1), (140, 160, "cpu0->gpu0", "hidden", 1)]


def test_rule_3_whole_layer_on_the_cpu_and_back() -> None:
    # gpu0       |DDDDD|00000|11111|                                 |head
    # gpu0->cpu0 |                 |h                               h|
    # cpu0       |                  |DDDDDDDDDD|22222....|33333....|
    #            0    100   200   300 320     520       920      1320 1340
    parts = {("attention", 1): "cpu0", ("dense", 1): "cpu0"}
    script = Script({("Routed", 0, 1, 0): [Run(1, [2, 3], "cpu0")]}, copies=ALL, parts=parts, routed=on_gpu)
    toy = machine({"gpu0": gpu(head_ns=70), "cpu0": cpu()})
    records = play(script, ONE, toy)
    assert tasks(records)[3:] == [
        (320, 520, "cpu0", "dense"), (520, 920, "cpu0", "E2x1"), (920, 1320, "cpu0", "E3x1"), (1340, 1410, "gpu0", "head")
    ]  # fmt: skip
    assert crossings(records) == [(300, 320, "gpu0->cpu0", "hidden", 1), (1320, 1340, "cpu0->gpu0", "hidden", 1)]


def test_rule_3_micro_batches_overlap_within_a_layer_and_meet_at_its_end() -> None:
    # Request 0 -> 0, 1 on the CPU; request 1 -> 2, 3 on the GPU. Layer 1 waits for both.
    # gpu0       |D0000|D1111|22222|33333|                              |D0...
    # gpu0->cpu0 |     |i
    # cpu0       |      |0000000000 400 ns |1111111111 400 ns |
    # cpu0->gpu0 |                                            |o
    #            0    100 120            520                 920 940
    work = workload([[[[0, 1], [0, 1]]], [[[2, 3], [2, 3]]]], micro_batches=2)
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "cpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), work)
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 200, "gpu0", "dense"), (200, 300, "gpu0", "E2x1"), (300, 400, "gpu0", "E3x1"),
        (120, 520, "cpu0", "E0x1"), (520, 920, "cpu0", "E1x1"),
        (940, 1040, "gpu0", "dense"), (1040, 1140, "gpu0", "dense"),
        (1140, 1240, "gpu0", "E0x1"), (1240, 1340, "gpu0", "E1x1"), (1340, 1440, "gpu0", "E2x1"), (1440, 1540, "gpu0", "E3x1"),
    ]  # fmt: skip
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (920, 940, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 940), (940, 1540)]
    assert [(x.mb, x.active, x.time) for x in records.lookups[:2]] == [(0, (0, 1), 100), (1, (2, 3), 200)]


def test_rule_3_each_micro_batch_takes_its_own_rows_only() -> None:
    # Both micro-batches use 0 and 1 on the CPU: two groups, a row each; no row crosses twice.
    # gpu0->cpu0 |i(mb0) at 100|   |i(mb1) at 200|
    # cpu0        120 |0  520|1  920|0 1320|1 1720|     experts of mb 0, then of mb 1
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    on_cpu = {("Routed", 0, 0, mb): [Run(0, [0, 1], "cpu0")] for mb in (0, 1)}
    records = play(Script(on_cpu, copies=ALL, routed=on_gpu), work)
    assert crossings(records) == [
        (100, 120, "gpu0->cpu0", "in", 1), (200, 220, "gpu0->cpu0", "in", 1),
        (920, 940, "cpu0->gpu0", "out", 1), (1720, 1740, "cpu0->gpu0", "out", 1),
    ]  # fmt: skip
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [
        (120, 520, "cpu0", "E0x1"), (520, 920, "cpu0", "E1x1"), (920, 1320, "cpu0", "E0x1"), (1320, 1720, "cpu0", "E1x1"),
    ]  # fmt: skip


def test_rule_3_shared_experts_run_before_routed_ones() -> None:
    # gpu0 |DDDDD|sss|00000|11111|DDDDD|sss|22222|33333|      s: 50
    model = tiny_model(n_shared=1, shared_intermediate=10)
    records = play(Script(copies=ALL, routed=on_gpu), ONE, model=model)
    assert tasks(records)[:4] == [
        (0, 100, "gpu0", "dense"), (100, 150, "gpu0", "shared"), (150, 250, "gpu0", "E0x1"), (250, 350, "gpu0", "E1x1")
    ]  # fmt: skip
    assert records.makespan_ns == 700


def test_the_end_of_shared_experts_is_told_for_each_micro_batch() -> None:
    model = tiny_model(n_shared=1, shared_intermediate=10)
    script = Script(copies=ALL, routed=on_gpu, hear=("SharedRan",))
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    records = play(script, work, model=model)
    told = [event for event in script.log if event[1][0] == "SharedRan"][:4]  # of the first of two runs
    assert told == [(t.end, ("SharedRan", 0, t.layer, t.mb, "gpu0")) for t in records.tasks if t.kind == "shared"]
    assert told[:2] == [(250, ("SharedRan", 0, 0, 0, "gpu0")), (500, ("SharedRan", 0, 0, 1, "gpu0"))]


def test_rule_3_shared_experts_elsewhere_delay_only_the_end_of_the_layer() -> None:
    # gpu0       |DDDDD|00000|11111|                 |DDDDD
    # gpu0->cpu0 |     |i
    # cpu0       |      |sssssssssssssssss 500|
    # cpu0->gpu0 |                            |o
    #            0    100 120                620 640
    model = tiny_model(n_shared=1, shared_intermediate=10)
    parts = {("shared", 0): "cpu0"}
    records = play(Script(copies=ALL, parts=parts, routed=on_gpu), ONE, model=model)
    assert (120, 620, "cpu0", "shared") in tasks(records)
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (620, 640, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 640), (640, 990)]


def test_rule_3_embedding_leading_layers_and_head_are_tasks_of_the_step() -> None:
    # gpu0 |e 30|leading 200 + attention 60|D...600 ns of layers...|head 70|      and the same again
    model = tiny_model(n_dense_layers=1, dense_intermediate=10)
    toy = machine({"gpu0": gpu(embedding_ns=30, leading_ns=200, head_ns=70), "cpu0": cpu()})
    work = workload([[[[0, 1], [2, 3]]] * 2])
    records = play(Script(copies=ALL, routed=on_gpu), work, toy, model=model)
    kinds = [t for t in tasks(records) if t[3] in ("embedding", "leading", "head")]
    assert kinds == [
        (0, 30, "gpu0", "embedding"), (30, 290, "gpu0", "leading"), (890, 960, "gpu0", "head"),
        (960, 990, "gpu0", "embedding"), (990, 1250, "gpu0", "leading"), (1850, 1920, "gpu0", "head"),
    ]  # fmt: skip
    assert [(s.begin, s.end) for s in records.steps] == [(0, 960), (960, 1920)]
    assert all(t.layer == -1 for t in records.tasks if t.kind in ("embedding", "leading", "head"))


def test_rule_3_the_head_runs_for_the_sequences_that_produce_a_token() -> None:
    # Two prompts of two rows in chunks of two rows: the first step ends one prompt, the second the other.
    rows = [[[0, 1], [2, 3]]] * 2
    work = workload([rows, rows], prompt=2, prefill_chunk=2)
    toy = machine({"gpu0": gpu(head_ns=70), "cpu0": cpu()})
    records = play(Script(copies=ALL, routed=on_gpu), work, toy)
    assert [t.rows for t in records.tasks if t.kind == "head"] == [1, 1]
    whole = workload([[[[0, 1], [2, 3]]] * 4], prompt=4, prefill_chunk=2)
    records = play(Script(copies=ALL, routed=on_gpu), whole, toy)
    assert [(t.start, t.rows) for t in records.tasks if t.kind == "head"] == [(1200, 1)]  # after the last chunk only
