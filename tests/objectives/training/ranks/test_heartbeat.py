"""Heartbeats of ranks: a rank that stops responding is detected."""

import threading

import torch.distributed as dist

from hpsearch.objectives.training import rank_heartbeat
from hpsearch.objectives.training.rank_heartbeat import RankHeartbeat
from tests.waiting import wait_for


def test_a_rank_that_stops_responding_is_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_heartbeat, "_MIN_TIMEOUT_SECONDS", 0.0)
    reasons, lost = [], threading.Event()

    def on_lost(reason):
        reasons.append(reason)
        lost.set()

    def start(rank, on_lost=on_lost):
        store = dist.PrefixStore("ranks", dist.FileStore(str(tmp_path / "store"), 3))
        return RankHeartbeat(store, rank, 3, timeout=0.8, on_lost=on_lost), store

    (first, store), (second, _), (third, _) = start(0), start(1, lambda _: None), start(2, lambda _: None)
    threading.Thread(target=lambda: store.wait(["a key that is never set"]), daemon=True).start()
    wait_for(
        lambda: store.check(["heartbeat/2"]) and int(store.get("heartbeat/2")) > 20, "more heartbeats than a timeout"
    )
    assert reasons == []
    third.stop()
    assert lost.wait(60)
    assert reasons == ["rank 2 has not responded for 0.8 s"]
    first.stop()
    second.stop()
