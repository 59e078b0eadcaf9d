"""What a qualifying run writes down, with stand-ins for the GPU."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from chord import _runtime
from chord.checks import __main__ as checks
from chord.checks import receipts
from chord.checks.qualify import Verdict
from chord.errors import NoProgramError, SettingsError
from chord.registry import receipts as files
from chord.registry.driver import Driver
from chord.registry.receipts import Receipts
from signing import key_pair


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is there in name only."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(receipts, "default_driver", lambda: _Driver())


class _Driver(Driver):
    def version(self):
        return 13000


def verdicts(*problems):
    found = []
    for name, program in list(_runtime.registry().programs("fused_router", "sm_90a").items())[: len(problems)]:
        found.append(Verdict(name, "sm_90a", program.builds["sm_90a"].cubin_sha256, 7, problems[len(found)]))
    return found


def handing_over(found, then=lambda: None):
    """A suite that finds these verdicts, one after the other."""

    def run(device, *, progress, **_options):
        for verdict in found:
            progress(verdict)
            then()
        return found

    return run


def test_the_command_leaves_a_receipt(gpu, tmp_path, monkeypatch, capsys):
    found = verdicts([], ["wrong " * 200] * 9)
    monkeypatch.setattr(checks, "qualify_all", handing_over(found))
    monkeypatch.setattr("sys.argv", ["checks", "--receipt", str(tmp_path / "new")])
    assert checks.main() == 1
    (path,) = (tmp_path / "new").iterdir()
    assert f"receipt: {path}" in capsys.readouterr().out
    assert path.name.startswith(f"nvidia-h200-{_runtime.registry().digest[:12]}-")
    receipt = files.decode(path.read_bytes(), str(path))
    assert receipt.driver.cuda == 13000
    assert receipt.sanitizer is None
    assert receipt.complete
    assert set(receipt.checks) == {"fused_router"}
    good, bad = (receipt.programs[verdict.program] for verdict in found)
    assert (good.passed, good.cases, good.problems) == (True, 7, ())
    assert (bad.passed, len(bad.problems)) == (False, 3)
    runs = Receipts([tmp_path / "new"], {})
    assert runs.ran_on(found[0].cubin_sha256) == ("NVIDIA H200",)
    assert runs.ran_on(found[1].cubin_sha256) == ("NVIDIA H200 (FAILED)",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--counts", "3", "--jobs", "2"], "--counts: expected with one process"),
        (["--brief"], "--brief: expected with --tiny, with one process"),
        (["--tiny", "--brief", "--receipt", "x"], "--brief: expected with --tiny, with one process and without"),
        (["--key", "k.pem"], "--key signs a receipt: expected --receipt FOLDER as well"),
    ],
)
def test_options_that_would_do_nothing_are_refused(gpu, monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.argv", ["checks", *words])
    with pytest.raises(SystemExit, match="2"):
        checks.main()
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["checks"])
    assert checks.main() == 2
    assert "expected a CUDA device, torch sees none" in capsys.readouterr().err


def test_a_program_with_two_verdicts_gets_no_receipt(gpu):
    """One of them would decide, and it might not be the one that failed."""
    (failed,) = verdicts(["3 entries differ"])
    with pytest.raises(ValueError, match=f"one verdict a program, got several of {failed.program}"):
        receipts.make([failed, failed._replace(problems=[])], 0, tiny=True)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError("the GPU is lost"), signal.SIGTERM])
def test_a_run_that_is_ended_early_leaves_what_it_has(gpu, tmp_path, monkeypatch, capsys, ending):
    found, kept = verdicts([], ["bad"], []), []

    def end():
        (path,) = tmp_path.iterdir()
        kept.append(files.decode(path.read_bytes(), str(path)))
        if len(kept) == 2:
            if isinstance(ending, signal.Signals):
                os.kill(os.getpid(), ending)
            else:
                raise ending

    monkeypatch.setattr(checks, "qualify_all", handing_over(found, end))
    monkeypatch.setattr("sys.argv", ["checks", "--receipt", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((KeyboardInterrupt, RuntimeError, SystemExit)):
        checks.main()
    assert signal.getsignal(signal.SIGTERM) is before
    (path,) = tmp_path.iterdir()
    left = files.decode(path.read_bytes(), str(path))
    assert [len(receipt.programs) for receipt in (*kept, left)] == [1, 2, 2]
    assert not any(receipt.complete for receipt in (*kept, left))
    assert Receipts([tmp_path], {}).suffices(found[0].cubin_sha256)
    assert not Receipts([tmp_path], {}).suffices(found[1].cubin_sha256)
    said = capsys.readouterr().err
    assert f"ended early; receipt: {path}, not complete: it has the 2 programs whose checks had ended" in said


def test_a_run_without_a_verdict_leaves_no_receipt(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "qualify_all", handing_over([]))
    monkeypatch.setattr("sys.argv", ["checks", "--only", "nothing", "--receipt", str(tmp_path)])
    assert checks.main() == 1
    assert list(tmp_path.iterdir()) == []


def test_each_run_is_a_file_of_its_own(gpu, tmp_path):
    for _ in range(3):
        with receipts.Journal(tmp_path, 0, tiny=True) as journal:
            journal.add(*verdicts([]))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_receipt_is_signed_if_there_is_a_key(gpu, tmp_path):
    secret, _ = key_pair(tmp_path, "ours")
    with receipts.Journal(tmp_path / "out", 0, tiny=False, key=secret) as journal:
        for verdict in verdicts([], ["bad"]):
            journal.add(verdict)
            assert not Path(f"{journal.path}.dsse").exists(), "only what will not change is signed"
    envelope = json.loads(Path(f"{journal.path}.dsse").read_text())
    assert len(envelope["signatures"]) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="expected a folder that can be written; name another with --receipt"):
        receipts.folder(tmp_path / "file" / "deeper")
    assert receipts.folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert receipts.folder(None) == _runtime.registry().root / files.FOLDER


def test_operators_become_patterns():
    assert receipts.patterns(None, "x*") == "x*"
    assert receipts.patterns(["fused_router", "route_plan"], "*") == "fused_router.*,route_plan.*"
    found = receipts.patterns(["route_plan"], "*.small*,fused_router.*").split(",")
    assert found
    assert all(name.startswith("route_plan.small") for name in found)
    assert receipts.patterns(["route_plan"], "fused_router.*") == "none of them"
    with pytest.raises(NoProgramError):
        receipts.patterns(["fused"], "*")
