"""The wheel's build hook: wheels carry the data and exactly the manifest's cubins, editable installs read the checkout.

Cubins come from build/out where `chord build` left them; what is missing is compiled with the pinned NVRTC, and a cubin
whose hash is not the manifest's fails the build.
"""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TABLE_ENDINGS = (".toml", ".json", ".dsse")
"""Endings of the files under registry/ that travel: tables, receipts and their signatures."""


class WheelData(BuildHookInterface):  # type: ignore[type-arg]
    """Adds chord/_data to wheels; hatchling finds the class by its base."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is written. Raises chord's ToolchainError, CompileError or VerificationError."""
        if version == "editable":  # included files would be copied into site-packages and go stale there
            return
        root = Path(self.root)
        cubins, source_endings = self._from_builder(root)
        files = [root / "manifest.json", root / "build" / "toolchain.toml", *cubins]
        files += [path for path in [root / "manifest.json.dsse"] if path.is_file()]  # signed, if whoever builds signs
        for folder, endings in (("registry", TABLE_ENDINGS), ("templates", source_endings)):  # no stray file travels
            files += [path for path in sorted((root / folder).rglob("*")) if path.name.endswith(endings)]
        for path in files:
            build_data["force_include"][str(path)] = f"chord/_data/{path.relative_to(root).as_posix()}"

    def _from_builder(self, root: Path) -> tuple[list[Path], tuple[str, ...]]:
        """The manifest's cubins, complete and verified, and the endings of what the builder reads under templates/.

        The builder is that of the tree which is being packed.
        """
        sys.path.insert(0, str(root))
        try:
            from chord.build.release import complete_store
            from chord.build.render import SOURCE_ENDINGS

            return complete_store(root, report=self.app.display_info), SOURCE_ENDINGS
        finally:
            sys.path.remove(str(root))
