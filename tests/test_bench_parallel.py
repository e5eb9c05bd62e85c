"""The prediction for several GPUs: its count of collectives, and what its formula says of links."""

import json

import parallel
import pytest


def test_collectives_are_two_a_layer_and_three_more():
    assert [n for _, n, _ in parallel.collectives(5, 2)] == [122, 1, 1, 1]
    assert [size for *_, size in parallel.collectives(5, 2)] == [5 * 14336, 5 * 14336, 2 * 327680, 16]


def test_small_sums_cost_latency_and_large_ones_bandwidth():
    links = parallel.Links()

    assert links.all_reduce_us(0, 1) == 8 and links.all_reduce_us(0, 2) == 46
    assert links.all_reduce_us(370_000_000, 1) == pytest.approx(8 + 1750)
    assert links.all_reduce_us(46_000_000, 2) == pytest.approx(46 + 1.75 * 46e3 / 370 + 125)


def test_a_gpu_sends_its_part_twice_to_sum_and_once_to_gather():
    """Eight GPUs, a tensor of 8 parts: a ring passes 7 of them on, once to sum and once to gather."""
    assert parallel.sent_bytes("all-reduce, embedding", 8, 8) == 14
    assert parallel.sent_bytes("all-gather, logits", 8, 8) == parallel.sent_bytes("broadcast, ids", 8, 8) == 7


def test_every_measured_step_is_predicted_for_one_node_and_two():
    measured = json.loads(parallel.MEASURED.read_text())

    rows = parallel.predict(measured, parallel.Links())

    (step_ms,) = (r["median_ms"] for r in measured["rows"] if (r["tokens"], r["mode"]) == (1, "full"))
    assert len(rows) == 16
    assert all(row["total_ms"] == row["compute_ms"] + row["collectives_ms"] for row in rows)
    decode = {row["tp"]: row for row in rows if (row["phase"], row["tokens"]) == ("decode", 1)}
    assert decode[8]["compute_ms"] == step_ms > decode[16]["compute_ms"]
    assert decode[8]["collectives_ms"] == pytest.approx(1.0, abs=0.05)
