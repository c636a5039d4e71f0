import errno
import hashlib
import re
import resource
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpointed import Net, adamw, advance, assert_same, everything
from torch import nn

from stars_fast.base import checkpoints as base_checkpoints
from stars_fast.base.checkpoints import checkpoints, latest, load_weights, saved_tensors
from stars_fast.base.checksums import SUMS
from stars_fast.base.errors import ConfigError
from stars_fast.training.run import checkpoint
from stars_fast.training.run.checkpoint import Checkpoints, SaveError
from stars_fast.training.scale.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
SHARDS = Path(__file__).parents[1] / "scripts" / "shards.py"
WRITER = checkpoint.dcp.FileSystemWriter


class Run:
    """A model and its optimiser, and the checkpoints of their run."""

    def __init__(self, folder, steps=0, seed=0, keep=0):
        self.net = Net(seed=seed)
        self.optimizer = adamw(self.net)
        self.told = []
        self.store = Checkpoints(folder, ALONE, keep, say=self.told.append)
        advance(self.net, self.optimizer, 0, steps)

    def save(self, step, state=None):
        self.store.save(step, self.net, self.optimizer, state or {})
        self.store.wait()
        return self.store.folder / f"step-{step:06d}"

    def load(self, path):
        return self.store.load(path, self.net, self.optimizer)

    def all(self):
        return everything(self.net, self.optimizer)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", steps=3)


@pytest.fixture
def other(tmp_path):
    """The same run before it has gone anywhere, from another seed."""
    return Run(tmp_path / "run", seed=1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_goes_on_bit_for_bit(run, other):
    state = {"step": 3, "sums": torch.arange(3.0), "nested": {"a": [1, None, (2.5, "b")]}}
    path = run.save(3, state)
    loaded = other.load(path)
    assert torch.equal(loaded.pop("sums"), state.pop("sums"))
    assert loaded == state
    assert_same(other.all(), run.all())
    assert other.net.head.weight is other.net.embed.weight
    assert other.net.unused not in other.optimizer.state
    for each in (run, other):
        advance(each.net, each.optimizer, 3, 6)
    assert_same(other.all(), run.all())
    assert not torch.equal(run.net.body.weight, Net().body.weight)


def test_what_changes_after_the_call_is_not_in_the_checkpoint(run, other, monkeypatch):
    expected, sums, changed, real = run.all(), torch.zeros(2), threading.Event(), WRITER.write_data

    def late(*args):
        assert changed.wait(30)
        return real(*args)

    monkeypatch.setattr(WRITER, "write_data", late)
    state = {"sums": sums, "rows": [1]}
    run.store.save(3, run.net, run.optimizer, state)
    advance(run.net, run.optimizer, 3, 5)
    with torch.no_grad():
        for value in (*run.net.parameters(), *run.net.buffers(), sums):
            value.add_(1)
    state["rows"].append(2)
    assert latest(run.store.folder) is None
    changed.set()
    run.store.wait()
    loaded = other.load(latest(run.store.folder))
    assert_same(other.all(), expected)
    assert torch.equal(loaded["sums"], torch.zeros(2))
    assert loaded["rows"] == [1]


def test_saving_before_the_first_step_changes_nothing(tmp_path, other):
    run, fresh = Run(tmp_path / "run"), Run(tmp_path / "never")
    path = run.save(0)
    assert_same(run.all(), fresh.all())
    other.load(path)
    for each in (run, fresh, other):
        advance(each.net, each.optimizer, 0, 3)
    assert_same(run.all(), fresh.all())
    assert_same(other.all(), fresh.all())


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_an_optimiser_that_would_skip_its_step_is_loaded(run, other, found):
    other.optimizer.found_inf = torch.tensor(found)
    other.optimizer.grad_scale = None
    other.load(run.save(3))
    assert_same(other.all(), run.all())


def test_state_of_another_dtype_than_the_weights_and_a_rate_in_a_tensor(tmp_path):
    """As torchao's optimisers have."""

    def make(seed):
        torch.manual_seed(seed)
        net = nn.Linear(3, 2).bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1 + seed))
        for p in net.parameters():
            averages = {key: torch.rand_like(p, dtype=torch.float32) for key in ("m", "v")}
            optimizer.state[p] = {"step": torch.tensor(float(seed)), **averages}
        return net, optimizer

    (net, optimizer), (other, again) = make(0), make(1)
    store, rate = Checkpoints(tmp_path, ALONE), again.param_groups[0]["lr"]
    store.save(1, net, optimizer, {})
    optimizer.param_groups[0]["lr"].fill_(7.0)
    store.load(tmp_path / "step-000001", other, again)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    assert_same(everything(other, again), everything(net, optimizer))
    assert again.param_groups[0]["lr"] is rate


def test_a_compiled_module_has_the_names_of_a_plain_one(run, other):
    path = run.save(3)
    other.net.body = torch.compile(other.net.body, backend="eager")
    other.load(path)
    assert torch.equal(other.net.body.weight, run.net.body.weight)
    again = other.save(4)
    load_weights(again, Net())


def test_weights_alone_are_loaded_in_the_dtype_of_the_model(run):
    net = Net(seed=1).bfloat16()
    load_weights(run.save(3), net)
    assert net.body.weight.dtype == torch.bfloat16
    assert torch.equal(net.body.weight, run.net.body.weight.bfloat16())
    assert torch.equal(net.norm.running_mean, run.net.norm.running_mean.bfloat16())
    assert net.head.weight is net.embed.weight


def test_the_newest_are_kept(tmp_path):
    run = Run(tmp_path, keep=2)
    for step in (2, 4, 1000000, 6):
        run.save(step)
    assert sorted(checkpoints(tmp_path)) == [6, 1000000]
    assert names(tmp_path) == ["step-000006", "step-1000000"]
    assert latest(tmp_path).name == "step-1000000"


def test_a_checkpoint_that_is_there_is_left_as_it_is(run, other):
    expected, path = run.all(), run.save(3)
    advance(run.net, run.optimizer, 3, 4)
    run.save(3)
    other.load(path)
    assert_same(other.all(), expected)


@pytest.mark.parametrize("stage", ["write_data", "finish", "write_bytes", "sync", "rename"])
def test_a_save_that_fails_leaves_no_checkpoint(run, monkeypatch, stage):
    first = run.save(1)
    real = Path.rename

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def rename(path, target):
        return fail() if target.name == "step-000002" else real(path, target)

    with monkeypatch.context() as patch:
        owner = {"write_data": WRITER, "finish": WRITER, "sync": checkpoint}.get(stage, Path)
        patch.setattr(owner, stage, rename if stage == "rename" else fail)
        run.store.save(2, run.net, run.optimizer, {})
        (told,) = soon(run.told)  # before anything waits for it
    message = (
        r"the checkpoint of step 2 in .* could not be written: No space left on device \(.* GB"
    )
    assert re.match(f"warning: {message}", told)
    assert names(run.store.folder) == [
        "step-000001"
    ]  # what is left of it may be what fills the disk
    assert latest(run.store.folder) == first
    with pytest.raises(SaveError, match=message):
        run.store.wait()
    run.store.wait()  # it is told once
    run.save(3)
    assert names(run.store.folder) == ["step-000001", "step-000003"]


def test_a_save_comes_through_after_one_that_failed(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sync", lambda path: 1 / 0)
        run.store.save(1, run.net, run.optimizer, {})
        soon(run.told)
    run.store.save(2, run.net, run.optimizer, {})
    run.store.wait()
    assert names(run.store.folder) == ["step-000002"]


def soon(told):
    """The list, once something is in it."""
    until = time.monotonic() + 30
    while not told:
        assert time.monotonic() < until
        time.sleep(0.01)
    return told


def test_a_full_disk(run):
    """Here the system refuses what goes beyond some bytes in a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        with pytest.raises(SaveError, match=r"File too large \(.* GB free at"):
            run.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest(run.store.folder) is None
    run.save(1)
    assert names(run.store.folder) == ["step-000001"]


def test_what_was_being_removed_is_gone_with_the_next_save(tmp_path, monkeypatch):
    run, real = Run(tmp_path, keep=1), shutil.rmtree
    run.save(1)

    def busy(path, **_):
        (path / "state.pt").unlink()
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        run.save(2)  # the new one is whole all the same
    assert real is shutil.rmtree
    assert run.told == [
        f"warning: {tmp_path}/step-000001 could not be removed: Device or resource busy"
    ]
    assert latest(tmp_path).name == "step-000002"
    assert names(tmp_path) == ["removing-000001", "step-000002"]
    run.save(3)
    assert names(tmp_path) == ["step-000003"]


def test_what_cannot_be_removed_is_told_once_and_left(tmp_path, monkeypatch):
    """As a folder of NFS is not empty while another process reads a file of it."""
    run, real = Run(tmp_path, keep=1), shutil.rmtree
    stuck = ("removing-000001", "writing-000009")

    def busy(path, **options):
        if path.name not in stuck:
            real(path, **options)
        elif not options:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    run.save(1)
    (tmp_path / stuck[1]).mkdir()
    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (2, 3, 4):
        run.save(step)
    assert names(tmp_path) == ["removing-000001", "step-000004", "writing-000009"]
    assert run.told == [
        f"warning: {tmp_path}/{name} could not be removed: Directory not empty"
        for name in ("writing-000009", "step-000001")
    ]
    with pytest.raises(SaveError, match=r"step 9 .* Directory not empty"):
        run.save(9)  # which needs the room


def test_a_file_that_only_another_process_sees_makes_no_checkpoint(run, monkeypatch):
    real = checkpoint.checksum

    def elsewhere(path):
        value = real(path)
        if path.suffix == ".distcp":
            path.unlink()
        return value

    monkeypatch.setattr(checkpoint, "checksum", elsewhere)
    with pytest.raises(SaveError, match=r"__0_0\.distcp.* all machines must see one file system"):
        run.save(1)
    assert names(run.store.folder) == []


@pytest.mark.parametrize("timeout", [None, "600"])
def test_a_save_for_which_torchrun_may_not_wait(run, monkeypatch, timeout):
    monkeypatch.setattr(checkpoint, "_LONG", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if timeout is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", timeout)
    for step in (1, 2):
        run.save(step)
    told = [line for line in run.told if "step-000001 took 0 s to write" in line]
    assert run.told == told
    assert len(told) == (timeout is None)


def test_the_end_waits_for_the_last_save_and_leaves_no_thread(run, monkeypatch):
    real, before = checkpoint.checksum, set(threading.enumerate())
    monkeypatch.setattr(checkpoint, "checksum", lambda path: time.sleep(0.2) or real(path))
    run.store.save(1, run.net, run.optimizer, {})
    run.store.close()
    assert names(run.store.folder) == ["step-000001"]
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("lost", ["state.pt", ".metadata"])
def test_a_directory_without_its_files_is_no_checkpoint(run, lost):
    path = run.save(3)
    (path.parent / "step-new").mkdir()
    (path.parent / "step-000009").mkdir()
    assert latest(path.parent) == path
    (path / lost).unlink()
    assert latest(path.parent) is None
    run.save(3)
    assert latest(path.parent) == path


def shorten(file):
    file.write_bytes(file.read_bytes()[:100])


def invert(file):
    """Eight bytes in the middle, as a bad sector or a memory that forgets would."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    file.write_bytes(content)


DAMAGES = [
    (name, damage)
    for name in ("__0_0.distcp", ".metadata", "state.pt", SUMS)
    for damage in (invert, shorten, Path.unlink)
    if (name, damage) != (SUMS, Path.unlink)  # as it was before there were checksums
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_set_aside(run, other, name, damage):
    expected, before, path = run.all(), run.save(2), run.save(3)
    assert other.store.whole() == path
    damage(path / name)
    hint = "; step-000002 before it is whole (--step 2)"
    for load in (lambda: load_weights(path, other.net), lambda: saved_tensors(path)):
        with pytest.raises(ConfigError, match=f"{path} is damaged, or no checkpoint: .*") as error:
            load()
        assert str(error.value).endswith(hint)
    assert other.store.whole() == before
    (told,) = other.told
    assert re.match(f"warning: {path} is damaged: .*{name}", told)
    assert "It is kept as damaged-000003; the run continues from step-000002" in told
    assert names(path.parent) == ["damaged-000003", "step-000002"]
    other.load(before)
    assert_same(other.all(), expected)
    other.save(3)
    damage(path / name)
    assert other.store.whole() == before
    assert names(path.parent) == ["damaged-000003", "damaged-000003.2", "step-000002"]


def test_what_a_flipped_bit_of_a_weight_was_before(run, other):
    """It loaded: nothing but the checksum tells."""
    path = run.save(3)
    (path / SUMS).unlink()
    weights = path / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    place = content.index(run.net.body.weight.detach().numpy().tobytes())
    content[place + 3] ^= 0x40
    weights.write_bytes(content)
    load_weights(path, other.net)
    assert not torch.equal(other.net.body.weight, run.net.body.weight)


def test_a_run_without_a_whole_checkpoint_is_refused_and_left_as_it_is(run, other):
    for step in (2, 3):
        shorten(run.save(step) / "state.pt")
    with pytest.raises(
        ConfigError, match=r"step-000003 is damaged.*no checkpoint of this run is wh"
    ):
        other.store.whole()
    assert names(run.store.folder) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.pt"])
def test_checkpoints_of_before_there_were_checksums(run, other, name):
    expected = run.all()
    for step in (2, 3):
        (run.save(step) / SUMS).unlink()
    path = run.store.folder / "step-000003"
    assert other.store.whole() == path
    other.load(path)
    assert_same(other.all(), expected)
    shorten(path / name)
    assert other.store.whole().name == "step-000002"


def test_the_checksums_are_those_of_sha256sum(run):
    path = run.save(3)
    lines = dict(reversed(line.split("  ")) for line in (path / SUMS).read_text().splitlines())
    assert sorted([*lines, SUMS]) == names(path)
    for name, value in lines.items():
        assert value == hashlib.sha256((path / name).read_bytes()).hexdigest()


def test_files_that_cannot_be_read_just_now_are_no_damage(run, other, monkeypatch):
    path = run.save(3)

    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(base_checkpoints, "checksum", refuse)
    with pytest.raises(ConfigError, match=r"\.metadata can't be read: Permission denied"):
        other.store.whole()
    assert names(path.parent) == ["step-000003"]


@pytest.mark.parametrize(
    "reader", ["torch.load", "torch.distributed.checkpoint.FileSystemReader.read_metadata"]
)
def test_nor_are_those_without_checksums(run, other, monkeypatch, reader):
    for step in (2, 3):
        (run.save(step) / SUMS).unlink()

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(reader, refuse)
    with pytest.raises(ConfigError, match=r"step-000003.* can't be read: Too many open files"):
        other.store.whole()
    assert names(run.store.folder) == ["step-000002", "step-000003"]


def test_nothing_is_written_once_another_owns_the_folder(run):
    first = run.save(1)

    class Lost:
        successor = "process 7 on far"

        def check(self):
            return False

    run.store = Checkpoints(run.store.folder, ALONE, keep=1, claim=Lost())
    with pytest.raises(SaveError, match="its folder belongs to process 7 on far now"):
        run.save(2)
    assert names(run.store.folder) == [first.name]


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 2)


class Renamed(Net):
    def __init__(self):
        super().__init__()
        self.arm = self.body
        del self.body


class Untied(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 7, bias=False)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Wider(), r"2 keys are of another shape or dtype: model.gate.bias \(\[1\] there, \[2\] he"),
        (Renamed(), "2 keys are missing: model.arm.bias, model.arm.weight; 2 keys are not expected"
         ": model.body.bias, model.body.weight"),
        (Untied(), "1 keys are missing: model.head.weight"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(run, net, message):
    path = run.save(3)
    with pytest.raises(ConfigError, match=f"{path} does not fit: {message}"):
        load_weights(path, net)


def test_a_run_that_does_not_fit_is_named(run):
    path = run.save(3)

    def load(net, optimizer):
        run.store.load(path, net, optimizer)

    with pytest.raises(ConfigError, match=r"model.body.bias \(torch.float32 there, torch.float64"):
        load(net := Net().double(), adamw(net))
    with pytest.raises(ConfigError, match=r"not expected: optimizer.body.bias.exp_avg, "):
        load(net := Net(), torch.optim.SGD(net.parameters(), momentum=0.9))
    net = Net()
    net.body.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"not expected: optimizer.body.bias.exp_avg, "):
        load(net, adamw(net))
    with pytest.raises(ConfigError, match=f"{path} does not fit: its optimiser groups"):
        load(net := Net(), torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))


def test_state_that_is_not_a_tensor_is_refused(run):
    run.optimizer.state[run.net.unused] = {"step": 3}
    with pytest.raises(TypeError, match=r"optimizer.unused.step: a checkpoint holds tensors alone"):
        run.save(3)


@pytest.fixture(scope="module")
def sharded(launch, tmp_path_factory):
    """What two processes left behind as they were killed during a save."""
    folder = tmp_path_factory.mktemp("sharded")
    codes = launch([str(SHARDS), str(folder)], processes=2)
    return folder, codes


@pytest.mark.slow
def test_processes_killed_during_a_save_leave_the_checkpoint_before_it(sharded):
    folder, codes = sharded
    assert codes == [-9, -9]
    assert "writing-000005" in names(folder / "run")
    assert sorted(checkpoints(folder / "run")) == [2, 3, 4]


@pytest.mark.slow
def test_shards_of_two_processes_are_loaded_in_one(sharded):
    folder, _ = sharded
    run = Run(folder / "run", seed=7)
    for step in (3, 4):
        expected = torch.load(folder / f"expected-{step}.pt")
        path = folder / "run" / f"step-{step:06d}"
        assert len(list(path.glob("*.distcp"))) == 2
        net = Net(seed=8)
        load_weights(path, net)
        for name, value in net.state_dict().items():
            assert torch.equal(value, expected[0][name]), name
        assert run.load(path) == {"step": step}
        assert_same(run.all(), expected)
    run.save(6)
    assert names(folder / "run") == [f"step-00000{step}" for step in (2, 3, 4, 6)]
