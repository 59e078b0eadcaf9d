"""R09 and the footprint of a serving process: the first request is quick, and nothing is written, opened or mapped."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the operators need torch")

from chord import _paths
from chord.bench import preloaded

ROOT = _paths.PACKAGE.parent
PATHS = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))


def fresh(code, *words):
    """Runs code in a fresh process; the lines of its output that are JSON objects."""
    environment = {**os.environ, "PYTHONPATH": PATHS, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


SERVING = r"""
import json, os, re, sys
import torch
import torch.utils._python_dispatch  # torch imports much of itself late
device = torch.device(sys.argv[1])
torch.set_num_threads(1)
torch.zeros(4, device=device).sum().item()
complaints, watching = [], [True]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate",
          "os.fork", "os.exec", "os.posix_spawn", "os.system", "shutil.copyfile", "tempfile.mkstemp")
COMPILERS = r"nvrtc|nvJitLink|nvptxcompiler|cicc|ptxas|libLLVM|libclang|nvvm"
def hook(event, args):
    if not watching:
        return
    if event == "open" and (args[2] & WRITES) and args[0] != "/dev/null":
        complaints.append((event, args))
    if event.startswith(("socket.", "subprocess.")) or event in EVENTS:
        complaints.append((event, args))
sys.addaudithook(hook)
def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "/" in line}
def open_files():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass  # the listing's own
    return found
before = mapped()
import chord
from chord import _runtime
registry = _runtime.registry()
if device.type == "cuda":
    for operator in registry.manifest.operators:
        registry.preload(operator)
started = complaints[:]
watching.clear()  # making inputs is not chord's serving
from cases.operators import CASES
work = [(case, case.make(tokens, device)) for case in CASES for tokens in (1, 16)]
prepared = [case.prepare(**given) for case, given in work if case.prepare]
for case, given in work:
    case.call(**given)
files = open_files()
watching.append(True)
complaints.clear()
for _ in range(20 if device.type == "cuda" else 2):
    for case, given in work:
        case.call(**given)
    for launch in prepared:
        launch()
if device.type == "cuda":
    torch.cuda.synchronize()
now = open_files()
print(json.dumps({
    "starting": [str(c) for c in started],
    "serving": [str(c) for c in complaints],
    "compilers": [path for path in mapped() - before if re.search(COMPILERS, path)],
    "new files": [path for name, path in now.items() if files.get(name) != path],
}))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_serving_process_writes_nothing_opens_no_socket_and_maps_no_compiler(device):
    """From the import of chord on, and after preload: an audit hook, the process's maps and its open files."""
    assert fresh(SERVING, device) == [{"starting": [], "serving": [], "compilers": [], "new files": []}]


REQUEST = r"""
import json, sys, time
import torch
from chord.bench.preloaded import forked
from chord.checks.inputs import normal_case
from chord.checks.w4a16 import gemm_case, placed
from chord.w4a16.layout import WeightShape
import chord
chord.fused_router, chord.moe_w4a16
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "/" in line}
def request(what, tokens):
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    if what == "fused_router":
        case = normal_case(tokens, 896, torch.float32, device)
    else:  # packed weights come from a checkpoint's loading, long before the first request
        case = placed(gemm_case(WeightShape(8, 256, 256), tokens, 8, 8, "random", torch.device("cpu")), device)
    before = libraries()
    torch.cuda.synchronize()
    start = time.perf_counter()
    if what == "fused_router":
        prepared = chord.prepare_fused_router(case.logits, case.bias, top_k=16, block_m=8)
    else:
        prepared = chord.prepare_moe_w4a16(case.x, case.packed, case.plan, top_k=8, block_m=8)
    prepared()
    torch.cuda.synchronize()
    took = (time.perf_counter() - start) * 1e3
    mapped = sorted(path for path in libraries() - before if "nvrtc" in path or "Jit" in path)
    print(json.dumps({"what": what, "request_ms": took, "mapped": mapped}))
for what, tokens in json.loads(sys.argv[1]).items():
    forked(lambda: request(what, tokens))
"""


@pytest.mark.gpu
def test_r09_the_first_request_is_quick():
    """Without preload: read, hash, load and launch within 60 ms, and no compiler in the process. Each operator's is a
    process of its own, forked before CUDA is up from one that has imported chord.
    """
    found = fresh(REQUEST, json.dumps(preloaded.OPERATORS))
    assert [cold["what"] for cold in found] == list(preloaded.OPERATORS)
    for cold in found:
        assert cold["request_ms"] <= 60, cold
        assert not cold["mapped"]


@pytest.mark.gpu
@pytest.mark.parametrize("what", preloaded.OPERATORS)
def test_r09_a_first_launch_after_preload_costs_at_most_twice_a_steady_one(what):
    """A launch's steady host time is one of a process that launches: there a preloaded program's first launch is within
    twice its own steady time. After a pause any launch takes the driver many times that, of whatever program: there a
    process's very first launch is within twice the same launch, after as long a pause, of the program in use.
    """
    found = preloaded.in_fresh_processes(what, 3)
    assert len(found) == 3
    assert not any(process.compilers for process in found)
    ratios = [first / steady for process in found for first, steady in process.programs.values()]
    assert len(ratios) >= 12
    assert statistics.median(ratios) <= 2, found
    assert statistics.median(p.first_after_pause_us / p.used_after_pause_us for p in found) <= 2, found
