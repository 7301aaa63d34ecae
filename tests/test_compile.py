"""What is compiled is compiled once per machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import jobs
import samestep as ss


def counted(team, folder):
    """Each worker notes how often it found compiled code, and how often it had to make it."""
    from torch._dynamo.utils import counters

    model = ss.models.mlp(100, (16,), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jobs.fit(team, model, optimizer, jobs.cross_entropy, jobs.images(64), 2, 32, compile=True)
    found = counters["inductor"]
    counts = [found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]
    Path(folder, f"{team.number}.json").write_text(json.dumps(counts))


def test_one_worker_compiles_and_the_others_find_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    ss.launch(counted, devices="2xcpu", lanes=8, args=(str(tmp_path),))
    hits, misses = zip(
        *(json.loads((tmp_path / f"{worker}.json").read_text()) for worker in (0, 1)), strict=True
    )
    assert sorted(misses)[0] == 0, "one of them made nothing"
    assert sorted(hits)[0] == 0
    assert max(hits) == max(misses) >= 1
