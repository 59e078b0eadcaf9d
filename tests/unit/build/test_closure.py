"""Closure hashes: everything that the compiler reads is in them, and nothing else (cases R24)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from chord.build.closure import Closure, Headers
from chord.build.scan import ClosureError

SOURCE = '#include "a.cuh"\nint x;\n'
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")


@pytest.fixture
def include(tmp_path: Path) -> Path:
    """source -> a.cuh -> <b.cuh> in another folder -> c.cuh inside #if."""
    for name, text in {
        "a.cuh": "#include <deep/b.cuh>\n",
        "deep/b.cuh": '#if 0\n#include "c.cuh"\n#endif\n',
        "c.cuh": "#pragma once\n",
        "unrelated.cuh": "int unrelated;\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def closure_of(include: Path, **changes: object) -> Closure:
    given = {
        "name": "k.cu",
        "source": SOURCE,
        "headers": Headers(include).needed_by(SOURCE, "k.cu"),
        "options": OPTIONS,
        "compiler": "nvrtc 12.9.86",
    }
    return Closure(**{**given, **changes})  # type: ignore[arg-type]


def test_r24_reaches_every_header(include: Path) -> None:
    assert list(closure_of(include).headers) == ["a.cuh", "c.cuh", "deep/b.cuh"]


def test_hash_is_the_documented_text(include: Path) -> None:
    def sha(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    text = (
        "chord closure 1\ncompiler nvrtc 12.9.86\noption --gpu-architecture=sm_90a\noption --std=c++17\n"
        f"source k.cu {sha(SOURCE)}\n"
    ) + "".join(f"header {name} {sha((include / name).read_text())}\n" for name in ("a.cuh", "c.cuh", "deep/b.cuh"))
    assert closure_of(include).sha256 == sha(text)


def test_r24_a_byte_of_a_header_in_a_dead_branch_counts_under_an_old_time(include: Path) -> None:
    before, times = closure_of(include).sha256, (include / "c.cuh").stat()
    (include / "c.cuh").write_text("#pragma oncE\n")
    os.utime(include / "c.cuh", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert closure_of(include).sha256 != before


def test_r24_an_unrelated_file_does_not_count(include: Path) -> None:
    before = closure_of(include).sha256
    (include / "unrelated.cuh").write_text("int other;\n")
    assert closure_of(include).sha256 == before


@pytest.mark.parametrize(
    "change",
    [
        {"options": (*OPTIONS, "--fmad=false")},
        {"options": OPTIONS[::-1]},
        {"compiler": "nvrtc 12.9.87"},
        {"name": "l.cu"},
        {"source": SOURCE + "\n"},
    ],
)
def test_r24_everything_else_counts(include: Path, change: dict[str, object]) -> None:
    assert closure_of(include, **change).sha256 != closure_of(include).sha256


def test_r24_headers_come_from_the_include_folder_alone(
    include: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("cwd")
    (elsewhere / "local.cuh").write_text("")
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ClosureError, match=r"^k\.cu:1: 'local\.cuh' is not under templates/include"):
        Headers(include).needed_by('#include "local.cuh"\n', "k.cu")
    with pytest.raises(ClosureError, match=r"'local\.cuh' is not under"):
        Headers(include).needed_by('#if __has_include("local.cuh")\n#endif\n', "k.cu")


def test_a_header_beside_the_including_one_is_not_found(include: Path) -> None:
    (include / "deep" / "near.cuh").write_text("")
    (include / "deep" / "b.cuh").write_text('#include "near.cuh"\n')
    with pytest.raises(ClosureError, match=r"^templates/include/deep/b\.cuh:1: 'near\.cuh' is not under"):
        Headers(include).needed_by(SOURCE, "k.cu")


def test_a_link_that_leads_out_is_refused(include: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder of somebody else's must not show its builder's files in a compiler's log."""
    outside = tmp_path_factory.mktemp("outside") / "secret.cuh"
    outside.write_text("secret")
    (include / "out.cuh").symlink_to(outside)
    with pytest.raises(ClosureError, match=rf"^k\.cu:1: 'out\.cuh' is a link out of templates/include, to {outside}"):
        Headers(include).needed_by('#include "out.cuh"\n', "k.cu")
    (include / "in.cuh").symlink_to("c.cuh")
    assert "in.cuh" in Headers(include).needed_by('#include "in.cuh"\n', "k.cu")


def test_a_header_that_no_wheel_would_carry_is_refused(include: Path) -> None:
    (include / "old.h").write_text("")
    with pytest.raises(ClosureError, match=r"^k\.cu:1: 'old\.h': expected a name that ends in \.cuh"):
        Headers(include).needed_by('#include "old.h"\n', "k.cu")


def test_headers_that_include_each_other(include: Path) -> None:
    (include / "c.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    assert list(Headers(include).needed_by(SOURCE, "k.cu")) == ["a.cuh", "c.cuh", "deep/b.cuh"]
