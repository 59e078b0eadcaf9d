"""The scanner: every include counts, what escapes the closure is refused (cases R24)."""

from __future__ import annotations

import pytest

from chord.build.scan import ClosureError, scan


def headers(text: str) -> list[str]:
    return [include.header for include in scan(text, "k.cu")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('#include "a/b.cuh"', ["a/b.cuh"]),
        ("#include <a/b.cuh>", ["a/b.cuh"]),
        ('  #  include\t"a.cuh"  // why', ["a.cuh"]),
        ('%:include "a.cuh"', ["a.cuh"]),
        ('#include /* which */ "a.cuh" /* why */', ["a.cuh"]),
        ('#include"a.cuh"', ["a.cuh"]),
        ('/* first */ #include "a.cuh"', ["a.cuh"]),
        ('#/**/include/**/"a.cuh"', ["a.cuh"]),
        ('#inc\\\nlude \\\n "a.cuh"', ["a.cuh"]),
        ('#if 0\n#include "a.cuh"\n#else\n#include "b.cuh"\n#endif', ["a.cuh", "b.cuh"]),
        ('#if __has_include("a.cuh")\n#endif', ["a.cuh"]),
        ("#if __has_include( <a.cuh> )\n#endif", ["a.cuh"]),
        ('// #include "a.cuh"', []),
        ('/*\n * #include "a.cuh"\n*/', []),
        ('/*\n#include "a.cuh"\n*/', ["a.cuh"]),
        ('// continued \\\n#include "a.cuh"', []),
        ('const char* s = R"(\n/*\n)";\n#include "a.cuh"\n/* */', ["a.cuh"]),
        ('/* a */ /* b\n */ #include "a.cuh"', ["a.cuh"]),
        ('#if 0\n\' " /*\n#endif\n#include "a.cuh"\n/* */', ["a.cuh"]),
        ('const char* s = "/*";\n#include "a.cuh"\nconst char* t = "*/";', ["a.cuh"]),
        ("int x = 1'000;  // it's /* not open\n#include \"a.cuh\"", ["a.cuh"]),
        ('char c = \'"\';\n#include "a.cuh"', ["a.cuh"]),
        ('#include "a.cuh"\r\n#include "b.cuh"\r\n', ["a.cuh", "b.cuh"]),
        ('const char* s = "a##b";  // a ## b', []),
        ("#pragma once\n#define X 1\n#error don't\n", []),
    ],
)
def test_finds(text: str, found: list[str]) -> None:
    assert headers(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('#include "/etc/passwd"', "absolute includes are refused"),
        ("#include </usr/include/stdio.h>", "absolute includes are refused"),
        ('#include "C:/x.h"', "absolute includes are refused"),
        ('#include "../x.cuh"', "plain path"),
        ('#include "a/../x.cuh"', "plain path"),
        ('#include "./x.cuh"', "plain path"),
        ('#include "a\\\\x.cuh"', "plain path"),
        ("#define H <a.cuh>\n#include H", "computed includes are refused"),
        ('#include_next "a.cuh"', "#include_next is refused"),
        ('#import "a.cuh"', "#import is refused"),
        ('#embed "a.bin"', "#embed is refused"),
        ("#define H __has_include\n", "__has_include: expected"),
        ("#ifdef __has_include\n#endif", "__has_include: expected"),
        ('#if __has_include("/etc/passwd")\n#endif', "absolute includes are refused"),
        ("const char* t = __TIME__;", "__TIME__ is refused"),
        ("const char* t = __DATE__;", "__DATE__ is refused"),
        ("const char* t = __TIMESTAMP__;", "__TIMESTAMP__ is refused"),
        ("const char* t = __FILE__;", "__FILE__ is refused"),
        ("const char* t = __builtin_FILE();", "__builtin_FILE is refused"),
        ("// written at __TIME__", "__TIME__ is refused"),
        ('int a; \\ \n#include "a.cuh"', "a backslash with blanks behind it"),
        ('int a;\r#include "a.cuh"', "a carriage return alone"),
        ("#if 0\nconst char* t = __TI\\\nME__;\n#endif", "__TIME__ is refused"),
        ("#define GLUE(a, b) a##b", "## is refused"),
        ("#define GLUE(a, b) a%:%:b", "%:%: is refused"),
    ],
)
def test_refuses(text: str, said: str) -> None:
    with pytest.raises(ClosureError, match=said):
        scan(text, "k.cu")


def test_refusal_names_file_and_line() -> None:
    with pytest.raises(ClosureError, match=r"^templates/include/x\.cuh:4: "):
        scan('/* one\ntwo */ int a; \\\nint b;\n#include "/abs.h"\n', "templates/include/x.cuh")


def test_include_lines() -> None:
    found = scan('#include "a.cuh"\n/*\n\n*/\n\n#include "b.cuh"\n', "k.cu")
    assert [(include.header, include.line) for include in found] == [("a.cuh", 1), ("b.cuh", 6)]
