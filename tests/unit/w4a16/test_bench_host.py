"""The host suite's bookkeeping, with stand-ins for what it measures."""

from __future__ import annotations

import pytest

from chord.bench import host, preloaded, results

LAUNCHES = host.LaunchTimes(3.0, 4.0, [3.0, 3.1], [4.0, 4.1])
FIRST = preloaded.FirstLaunches(9.0, 100.0, 90.0, 4.0, {"a": (6.0, 4.0), "b": (7.0, 5.0)}, [])


@pytest.fixture
def measured(monkeypatch):
    """What was measured, in order: each launch size, each fresh process."""
    done = []

    def launches(tokens, _launches, add):
        done.append(tokens)
        add("prepared", tokens, "p", LAUNCHES.prepared_samples)

    def first(tokens):
        done.append("first_call")
        return host.FirstCall(80.0, 40.0, False)

    def fresh(operator, count):
        done.extend([operator] * count)
        return [FIRST] * count

    monkeypatch.setattr(host, "_add_launches", launches)
    monkeypatch.setattr(host, "_add_w4a16_launches", lambda count, add: launches(4, count, add))
    monkeypatch.setattr(host, "first_call", first)
    monkeypatch.setattr(preloaded, "in_fresh_processes", fresh)
    monkeypatch.setattr(results.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return done


def test_every_row_is_saved_when_it_is_there_and_fresh_processes_come_last(measured):
    saved, shown = [], []
    found = host.run(commit="c", progress=shown.append, save=lambda sofar: saved.append(len(sofar.rows)))
    assert saved == list(range(1, len(found.rows) + 1))
    assert shown == found.rows
    assert measured == [1, 16, 300, 2048, 4, *["first_call"] * 3, *["fused_router"] * 2, *["moe_w4a16"] * 2]
    steady = next(row for row in found.rows if row.scenario == "w4a16_preloaded_steady")
    assert (steady.samples, steady.us) == (4, 4.5)


def test_an_interrupted_run_has_saved_what_was_measured(measured, monkeypatch, tmp_path):
    def killed(operator, count):
        raise KeyboardInterrupt

    monkeypatch.setattr(preloaded, "in_fresh_processes", killed)
    path = tmp_path / "host.json"
    with pytest.raises(KeyboardInterrupt):
        host.run(processes=1, commit="c", save=lambda sofar: results.write(sofar, path))
    assert [row.scenario for row in results.read(path).rows] == ["prepared"] * 5 + ["first_call", "import"]
    assert measured.count("first_call") == 1


def test_a_forks_output_and_failure_reach_its_parent(capfd):
    preloaded.forked(lambda: print("from the fork"))
    with pytest.raises(ChildProcessError, match="ended with 1"):
        preloaded.forked(lambda: 1 // 0)
    said = capfd.readouterr()
    assert said.out == "from the fork\n"
    assert "ZeroDivisionError" in said.err
