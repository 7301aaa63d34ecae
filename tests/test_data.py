"""Datasets, order, loading ahead."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import jobs
import samestep as ss
from samestep import datasets, models, seeds
from samestep.data import Loader, Unit
from samestep.payload import pack, unpack

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def test_tensors_are_indexed_in_bulk_and_one_by_one():
    data = ss.data.Tensors(torch.arange(6).view(3, 2), [7, 8, 9])
    x, y = data.gather(torch.tensor([2, 0]))
    assert (x.tolist(), y.tolist()) == ([[4, 5], [0, 1]], [9, 7])
    assert data[-1][1] == 9
    with pytest.raises(IndexError, match="sample 3 of 3"):
        data[3]
    assert len(data.first(2)) == 2


def test_tensors_of_different_lengths():
    with pytest.raises(ss.UsageError, match="the lengths must be equal, got 3, 2"):
        ss.data.Tensors(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ss.UsageError, match="at least one tensor"):
        ss.data.Tensors()


def test_order_is_a_function_of_seed_and_epoch():
    assert torch.equal(seeds.order(100, 3, 5, True), seeds.order(100, 3, 5, True))
    assert not torch.equal(seeds.order(100, 3, 5, True), seeds.order(100, 3, 6, True))
    assert not torch.equal(seeds.order(100, 3, 5, True), seeds.order(100, 4, 5, True))
    assert sorted(seeds.order(100, 3, 5, True).tolist()) == list(range(100))


def visited(team, counted, **options):
    epochs = team.epochs(2) if counted else range(2)
    data = ss.data.Tensors(torch.arange(10))
    return [[b.indices.tolist() for b in team.batches(data, 4, **options)] for _ in epochs]


@pytest.mark.parametrize("counted", [True, False], ids=["team.epochs", "range"])
def test_epochs_visit_every_sample_once_in_an_order_of_their_own(counted):
    first, second = ss.launch(visited, devices="1xcpu", args=(counted,))
    assert first != second
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(index for batch in epoch for index in batch) == list(range(10))


def test_without_shuffle_and_without_the_last():
    options = {"shuffle": False, "drop_last": True}
    epochs = ss.launch(visited, devices="1xcpu", args=(True,), kwargs=options)
    assert epochs == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def loaded(loaders, units, asked, **options):
    loader = Loader(jobs.Noisy(), seed=1, epoch=2, loaders=loaders, ahead=iter(units), **options)
    try:
        return [loader.load(unit) for unit in asked]
    finally:
        loader.close()


def same(a, b):
    return all(
        torch.equal(x, y) for f, g in zip(a, b, strict=True) for x, y in zip(f, g, strict=True)
    )


UNITS = [
    Unit(b, lane, torch.tensor([4 * b + lane, 4 * b + lane + 20]))
    for b in range(4)
    for lane in range(4)
]


def test_background_loaders_give_what_the_worker_itself_would():
    assert same(loaded(0, [], UNITS), loaded(2, UNITS, UNITS))


def test_a_plan_that_changes_asks_for_units_that_were_not_foreseen():
    foreseen = [unit for unit in UNITS if unit.lane < 2]
    asked = [unit for unit in UNITS if unit.lane >= 1 or unit.batch == 3]
    assert same(loaded(0, [], asked), loaded(2, foreseen, asked))


def test_a_loader_that_dies_is_an_error_and_not_a_hang():
    class Deadly(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    loader = Loader(Deadly(), seed=0, epoch=0, loaders=1, ahead=iter(UNITS[:1]))
    with pytest.raises(ss.WorkerDied, match="background loader was ended by SIGKILL"):
        loader.load(UNITS[0])
    loader.close()


def test_torch_datasets_of_tensors_are_indexed_in_bulk():
    data = torch.utils.data.TensorDataset(torch.arange(8))
    assert loaded_one(data)[0].tolist() == [3, 1]


def loaded_one(dataset):
    return Loader(dataset, seed=0, epoch=0).load(Unit(0, 0, torch.tensor([3, 1])))


def test_samples_that_are_dicts_are_one_field():
    class Dicts(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"x": index}

    (batch,) = loaded_one(Dicts())
    assert batch["x"].tolist() == [3, 1]


def test_payload_carries_functions_and_large_tensors():
    large, small = torch.randn(200, 200), torch.ones(3)
    half = torch.arange(1 << 16, dtype=torch.bfloat16)
    fd = pack(
        (
            lambda x: x + 1 + torch.backends.cudnn.benchmark,
            {"a": large, "again": large, "t": large.t()},
            small,
            half,
        )
    )
    try:
        function, tensors, little, halves = unpack(fd)
    finally:
        os.close(fd)
    assert function(1) == 2
    assert torch.equal(tensors["a"], large)
    assert tensors["a"] is tensors["again"]
    assert torch.equal(tensors["t"], large.t())
    assert torch.equal(little, small)
    assert torch.equal(halves, half)


# Fashion-MNIST


@pytest.mark.skipif(not DEBIAN.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_is_the_real_one():
    train, test = ss.data.fashion_mnist()
    assert (len(train), len(test)) == (60_000, 10_000)
    images, labels = train.gather(torch.arange(5))
    assert labels.tolist() == [9, 0, 0, 3, 0]
    assert images.shape == (5, 1, 28, 28)
    everything = train.gather(torch.arange(60_000))[0]
    assert abs(everything.mean()) < 1e-3
    assert abs(everything.std() - 1) < 1e-3
    assert images.dtype == torch.float32
    again, _ = ss.data.fashion_mnist()
    assert torch.equal(again.fields[0], train.fields[0]), "the cache holds the same"
    assert torch.bincount(train.fields[1]).tolist() == [6000] * 10


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A local server with a small dataset under the public names, and a cache of its own."""
    folder = tmp_path / "server"
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 255, (6, 28, 28)), rng.integers(0, 10, 6)] * 2
    sums = []
    for name, array in zip(datasets._PARTS, arrays, strict=True):
        content = idx(array)
        (folder / f"{name}.gz").write_bytes(content)
        sums.append(hashlib.md5(content).hexdigest())

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        nowhere = (str(tmp_path / "nowhere"),)
        known = datasets._Known("small", nowhere, address, tuple(sums), mean=0.5, deviation=0.3)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield known, folder, tmp_path / "cache" / "samestep" / "small"
        server.shutdown()
        thread.join()


def test_download_is_checked_and_kept(served):
    known, folder, cache = served
    train, test = datasets._read(known, None)
    assert (len(train), len(test)) == (6, 6)
    for file in folder.iterdir():
        file.unlink()
    assert len(datasets._read(known, None)[0]) == 6, "from the cache"
    assert not [name for name in os.listdir(cache) if name.startswith("tmp")]


def test_a_download_that_is_damaged_is_refused_and_leaves_nothing(served):
    known, folder, cache = served
    (folder / f"{datasets._PARTS[0]}.gz").write_bytes(b"something else")
    with pytest.raises(ss.DatasetMissing, match=r"its MD5 is .*, expected .*put its four"):
        datasets._read(known, None)
    assert os.listdir(cache) == []


def test_no_network_is_one_clear_error(served):
    known, folder, _ = served
    (folder / f"{datasets._PARTS[0]}.gz").unlink()
    with pytest.raises(ss.DatasetMissing, match=r"small: not in .*gave: HTTP Error 404"):
        datasets._read(known, None)


def test_a_folder_without_the_files(tmp_path):
    with pytest.raises(ss.DatasetMissing, match=r"has no train-images-idx3-ubyte.gz of mnist"):
        ss.data.mnist(tmp_path)


def test_a_cache_that_cannot_be_written(served, monkeypatch):
    known, folder, cache = served
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder should be")
    train, _ = datasets._read(known, folder)
    assert len(train) == 6


def test_shapes_are_ten_classes_that_can_be_learnt():
    train, test = ss.data.shapes(train=500, test=100)
    assert (len(train), len(test)) == (500, 100)
    again, _ = ss.data.shapes(train=500, test=100)
    assert torch.equal(train.fields[0], again.fields[0])
    assert sorted(set(train.fields[1].tolist())) == list(range(10))
    recipe = models.Recipe(model="mlp", data="shapes", batch_size=64, lr=0.2, epochs=3)
    assert ss.launch(models.train, devices="2xcpu", args=(recipe,))["accuracy"] > 0.6
