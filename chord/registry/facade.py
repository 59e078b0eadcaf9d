"""The registry: a manifest, proven to be the pinned one, and the store of cubins beside it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path

from chord import _paths, _settings
from chord._version import __version__, same_version
from chord.errors import (
    DriverError,
    ManifestError,
    NoProgramError,
    SettingsError,
    UnsupportedDeviceError,
)
from chord.registry import canonical
from chord.registry.architectures import KNOWN, ordered
from chord.registry.boxes import Interval
from chord.registry.decoding import MANIFEST_BYTES, read_bounded
from chord.registry.demands import Demands, check_locks
from chord.registry.launch import Kernel
from chord.registry.loading import Loader, default_loader
from chord.registry.lookup import RouteIndex
from chord.registry.receipts import FOLDER, Receipts
from chord.registry.schema import Arm, Build, Constant, Manifest, Operator, Program, Route
from chord.registry.store import Store
from chord.registry.verify import Report, verified_bytes, verify_all

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Selection:
    """What a lookup found: a program and its build for one architecture."""

    operator: str
    program_name: str
    program: Program
    arm: Arm
    arch: str

    @property
    def build(self) -> Build:
        return self.program.builds[self.arch]


class Registry:
    """Opened with `Registry.open`. Everything but `load`, `preload` works without a driver and writes nothing.

    `root` is the folder, `source` says where it came from, `digest` is the SHA-256 of the manifest's bytes.
    `receipts` says which cubins have run where; `require_receipt`: load no others. `signed_by` is the id of a required
    key that signed the manifest.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        *,
        root: Path,
        source: str,
        digest: str,
        loader: Loader | None = None,
        receipts: Receipts | None = None,
        require_receipt: bool = False,
        signed_by: str | None = None,
    ) -> None:
        self.manifest = manifest
        self.store = store
        self.root = root
        self.source = source
        self.digest = digest
        self.receipts = receipts or Receipts([root / FOLDER], {})
        self.require_receipt = require_receipt
        self.signed_by = signed_by
        self._loader = loader or default_loader()
        self._indices = {name: RouteIndex(name, operator) for name, operator in manifest.operators.items()}
        self._kernels: dict[tuple[int, str], Kernel] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        pin: str | None = None,
        *,
        lock: str | Path | None = None,
        key: str | Path | None = None,
        receipts: str | Path | None = None,
        require_receipt: bool | None = None,
        relock: bool = False,
        resign: bool = False,
        path_name: str = "path",
    ) -> Registry:
        """Open the registry in `path`, else in CHORD_REGISTRY, else the packaged one. There is no fallback.

        The folder holds manifest.json, and the cubins under build/out/cubins (as `chord build` leaves them) or cubins.
        pin: the digest that the manifest must have; CHORD_PIN likewise.
        lock: a file that `chord lock` wrote; CHORD_LOCK, and a chord.lock beside the manifest, likewise.
        key: a file of Ed25519 public keys, one of which must have signed the manifest; CHORD_KEY likewise.
          Of pins, locks and keys all that are given count.
        receipts: a folder of receipts beside the registry's own; CHORD_RECEIPTS if not given.
        require_receipt: load only cubins that have one; CHORD_REQUIRE_RECEIPT if not given.
        relock: no lock file counts, since a new one is to be written.
        resign: no key counts, since the manifest is to be signed.
        path_name: what `source` and errors call `path`, for a caller whose users know it under another name.
        Raises SettingsError, PinMismatchError, LockError, SignatureError or ManifestError; TypeError for a
        require_receipt that is no bool.
        """
        settings = _settings.read()
        given = _path(path, path_name)
        root, source = (given, path_name) if given is not None else _locate(settings)
        demands = Demands.gather(
            settings, root, pin=pin, lock=_path(lock, "lock"), key=_path(key, "key"), relock=relock, resign=resign
        )
        if require_receipt not in (None, False, True):  # such as "no", which is true
            raise TypeError(f"require_receipt: expected a bool, got {require_receipt!r}")
        named = _receipts_folder(settings, receipts)
        manifest_path = root / MANIFEST_NAME
        try:
            data = read_bounded(manifest_path, MANIFEST_BYTES)
        except OSError as error:
            raise SettingsError(
                f"{source}: expected a registry in {root}, cannot read {MANIFEST_NAME} there ({error.strerror}); "
                "give a folder that `chord build` has filled"
            ) from error
        digest = canonical.digest(data)
        locks, signed_by = demands.check_bytes(manifest_path, data, digest)
        manifest = canonical.decode(data, str(manifest_path))
        _check_version(manifest_path, manifest.registry.version)
        check_locks(locks, manifest, digest)
        return cls(
            manifest,
            Store(_paths.store_of(root)),
            root=root,
            source=source,
            digest=digest,
            receipts=Receipts([root / FOLDER, *filter(None, [named])], demands.keys),
            require_receipt=settings.require_receipt if require_receipt is None else require_receipt,
            signed_by=signed_by,
        )

    def __repr__(self) -> str:
        return f"Registry({str(self.root)!r}, from {self.source}, digest {self.digest})"

    # Looking up: pure functions of the manifest

    def lookup(self, operator: str, arch: str, problem: Mapping[str, object]) -> Selection:
        """The program for a problem (a value for each key of the operator's axes). Raises NoProgramError, TypeError."""
        try:
            definition = self._operator(operator)
            return self._selection(operator, definition, self._indices[operator].find(arch, problem), arch)
        except TypeError as error:
            raise TypeError(
                "lookup: expected the names of an operator and of an architecture, and a mapping with a value for each "
                f"of the operator's keys, got {operator!r:.100}, {arch!r:.100} and {problem!r:.100}: {error}"
            ) from error

    def programs(self, operator: str | None = None, arch: str | None = None) -> dict[str, Program]:
        """Programs by name, sorted; of one operator, or with a build for one architecture, if given.

        Raises NoProgramError for an operator that is not there and for a name that is no architecture's.
        """
        if arch not in (None, *KNOWN):
            raise NoProgramError(
                f"architecture {arch!r} is not known: expected one of {', '.join(KNOWN)}; names are matched exactly"
            )
        names = self.manifest.operators if operator is None else (operator,)
        found = {name: p for o in names for name, p in self._operator(o).programs.items() if arch in (None, *p.builds)}
        return dict(sorted(found.items()))

    def coverage(self, operator: str, arch: str) -> tuple[Route, ...]:
        """Which boxes of the operator's domain run which program on an architecture. Raises NoProgramError."""
        definition = self._operator(operator)
        routes = definition.routes.get(arch)
        if routes is None:
            raise NoProgramError(
                f"{operator} has no routes for architecture {arch!r}; it has {', '.join(ordered(definition.routes))}"
            )
        return routes

    def verify(self) -> Report:
        """Prove every cubin that the manifest names, and that the store holds nothing else."""
        return verify_all(self.manifest, self.store)

    # Loading: from here on a driver is needed

    def load(self, selection: Selection | str, device: int | None = None) -> Kernel:
        """A program, by selection or by name, on a device (the current one if not given): proven and loaded once.

        Raises TypeError for anything else, VerificationError, ReceiptError, NoProgramError, UnsupportedDeviceError,
        DriverError, CaptureError or ForkError.
        """
        if isinstance(selection, str):
            name, arch = selection, None
        elif isinstance(selection, Selection):
            name, arch = self._own(selection).program_name, selection.arch
        else:
            raise TypeError(
                "selection: expected a Selection (what Registry.lookup returns) or a program's name, got "
                f"{selection!r} ({type(selection).__name__})"
            )
        driver = self._loader.driver
        driver.start()
        if device is None:
            device = driver.current_device()
        found = self._kernels.get((device, name))
        if found is None or arch not in (None, found.arch):
            with self._lock:
                found = self._load(self._for_device(name, arch, device), device)
        return found

    def preload(
        self,
        operator: str,
        ranges: Mapping[str, Constant | Sequence[int]] | None = None,
        device: int | None = None,
    ) -> tuple[str, ...]:
        """Load every program that problems in `ranges` can select; the names, sorted.

        ranges: per key of the operator's axes a value, [first, last] (a list or a tuple), or a range with step 1; a key
          that is left out means all of its values. Raises ValueError for anything else.
        """
        keys = {key for axis in self._operator(operator).axes for key in axis.keys}
        if not keys.issuperset(ranges or {}):
            raise ValueError(
                f"{operator}: expected ranges of {', '.join(sorted(keys))}, got {', '.join(map(str, ranges or {}))}"
            )
        wanted = {key: _side(f"{operator}: {key}", value) for key, value in (ranges or {}).items()}
        driver = self._loader.driver
        driver.start()
        if device is None:
            device = driver.current_device()
        routes = self.coverage(operator, driver.architecture(device))
        names = sorted({route.program for route in routes if _touches(route, wanted)})
        if not names:
            raise NoProgramError(f"{operator}: nothing in its domain lies in {wanted}; see `chord coverage {operator}`")
        for name in names:
            self.load(name, device)
        return tuple(names)

    def _load(self, chosen: Selection, device: int) -> Kernel:
        known = self._kernels.get((device, chosen.program_name))
        if known is not None:
            return known
        driver = self._loader.driver
        place = f"{chosen.program_name} for {chosen.arch}"
        available = driver.version()
        if available < chosen.build.min_driver:
            raise DriverError(
                f"{place}: expected a driver for CUDA {_cuda(chosen.build.min_driver)} or newer, "
                f"found one for {_cuda(available)}; update NVIDIA's driver"
            )
        if self.require_receipt:
            self.receipts.require(place, chosen.build.cubin_sha256)
        functions = self._loader.functions(
            device,
            chosen.build.cubin_sha256,
            chosen.program.kernels,
            place,
            lambda: verified_bytes(self.store, chosen.program_name, chosen.program, chosen.arm, chosen.arch),
        )
        kernel = Kernel(chosen.program_name, chosen.program, chosen.arm, chosen.arch, device, driver, functions)
        self._kernels[device, chosen.program_name] = kernel
        return kernel

    def _for_device(self, name: str, selected: str | None, device: int) -> Selection:
        """The program's build for a device. selected: the architecture that was looked up, if one was."""
        operator = name.partition(".")[0]
        definition = self._operator(operator)
        if name not in definition.programs:
            raise NoProgramError(f"{name}: no such program of {operator}; `chord ls` lists those that exist")
        needed = self._loader.driver.architecture(device)
        builds = definition.programs[name].builds
        if needed not in builds or selected not in (None, needed):
            raise UnsupportedDeviceError(
                f"{name}: device {device} needs {needed}, has {', '.join(ordered(builds))}"
                + ("" if selected in (None, needed) else f", and {selected} was selected")
            )
        return self._selection(operator, definition, name, needed)

    def _own(self, selection: Selection) -> Selection:
        ours = self._operator(selection.operator).programs.get(selection.program_name)
        if ours is not selection.program:
            raise ValueError(
                f"{selection.program_name}: selected from another registry than {self.root}; look it up here"
            )
        return selection

    def _selection(self, operator: str, definition: Operator, name: str, arch: str) -> Selection:
        program = definition.programs[name]
        return Selection(operator, name, program, definition.arms[program.arm], arch)

    def _operator(self, name: str) -> Operator:
        found = self.manifest.operators.get(name)
        if found is None:
            raise NoProgramError(
                f"no operator {name!r}; there are {', '.join(sorted(self.manifest.operators)) or 'none'}"
            )
        return found


def _locate(settings: _settings.Settings) -> tuple[Path, str]:
    if settings.registry is not None:
        return settings.registry, "CHORD_REGISTRY"
    root = _paths.data_root()
    return root, "the checkout" if root == _paths.PACKAGE.parent else "the packaged registry"


def _path(path: str | Path | None, name: str) -> Path | None:
    """A path that was given. An empty one would be the working folder by chance: raises SettingsError."""
    if isinstance(path, str) and not path.strip():
        raise SettingsError(f"{name} is empty: expected a path; give one, or leave it out")
    return None if path is None else Path(path)


def _receipts_folder(settings: _settings.Settings, receipts: str | Path | None) -> Path | None:
    """The folder of receipts that an argument or the environment names. Raises SettingsError for what is none."""
    named = settings.receipts if receipts is None else _path(receipts, "receipts")
    if named is not None and not named.is_dir():
        variable = "CHORD_RECEIPTS" if receipts is None else "receipts"
        raise SettingsError(f"{variable}: expected a folder of receipts, {named} is none")
    return named


def _check_version(path: Path, version: str) -> None:
    if not same_version(version, __version__):
        raise ManifestError(
            f"{path} belongs to chord {version}, this is chord {__version__}; install the two that belong together, "
            "or rebuild with `chord build`"
        )


def _side(what: str, value: object) -> Constant | Interval:
    """One entry of preload's ranges, checked. Raises ValueError."""
    if isinstance(value, str):
        return value
    with suppress(TypeError):  # of what is no whole number
        if not isinstance(value, Sequence):
            return index(value)  # type: ignore[arg-type]
        ends = value
        if isinstance(value, range):
            ends = (value[0], value[-1]) if value and value.step == 1 else ()
        if len(ends) == 2 and index(ends[0]) <= index(ends[1]):
            return index(ends[0]), index(ends[1])
    raise ValueError(
        f"{what}: expected a value, [first, last] with first <= last, or a range with step 1 that is not empty, got "
        f"{value!r}"
    )


def _touches(route: Route, wanted: Mapping[str, Constant | Interval]) -> bool:
    for key, value in wanted.items():
        side = route.where[key]
        first, last = side if isinstance(side, tuple) else (side, side)
        low, high = value if isinstance(value, tuple) else (value, value)
        if isinstance(first, str) or isinstance(low, str):
            if first != low:
                return False
        elif int(high) < first or low > int(last):
            return False
    return True


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
