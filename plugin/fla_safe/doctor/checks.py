"""The doctor's checks, one function a trap, each measured or read in its upstream's code (docs/troubleshooting.md)."""

import os
from contextlib import suppress
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fla_safe.doctor.facts import Environment
from fla_safe.doctor.report import Check, Finding, bad, good, warn
from fla_safe.runtime.artifacts.directories import find_stale
from fla_safe.runtime.artifacts.roots import (
    NETWORK_FILESYSTEMS,
    ArtifactError,
    choose_root,
    filesystem_type,
    require_own_directory,
)
from fla_safe.runtime.tuning.decisions import DecisionTable, TableError
from fla_safe.tables import shipped_tables

__all__ = ["CHECKS"]

# Required: a job cannot start without it. The ranges are those that the project's tests run against.
SUPPORTED = {
    "torch": (">=2.8", True),
    "triton": (">=3.6,<3.10", True),
    "fla-core": (">=0.4.2,<0.7", True),
    "megatron-core": (">=0.16,<0.20", False),
    "mcore-bridge": (">=1.6,<1.7", False),
    "ms-swift": (">=4.5,<4.7", False),
}

# Variable, value that is a trap ("" for any), is it an error, what it does, what to do.
VARIABLES = (
    ("TRITON_ALWAYS_COMPILE", "1", True, "makes Triton compile every kernel in every process", "unset it"),
    ("TRITON_CACHE_AUTOTUNING", "1", False, "makes Triton keep tuning results in an unguarded file", "unset it"),
    (
        "TRITON_CACHE_MANAGER",
        "",
        False,
        "puts another cache behind kernels that are not GDN's",
        "unset it if not meant",
    ),
    ("TRITON_KERNEL_OVERRIDE", "1", True, "replaces kernels by files", "unset it"),
    ("TRITON_KERNEL_DUMP", "1", False, "writes every kernel to a dump directory", "unset it"),
    ("TRITON_DEBUG", "1", False, "changes the code of every kernel", "unset it"),
    ("FLA_CACHE_MODE", "", False, "makes FLA look for tuning files at new keys", "unset it"),
    ("CUDA_LAUNCH_BLOCKING", "1", False, "waits for the GPU after every launch", "unset it"),
    ("SWIFT_USE_MCORE_GDN", "", False, "does nothing in ms-swift 4.1 and later", "use --gdn_impl"),
)


def versions(env: Environment) -> list[Finding]:
    """Every package is in the range that is tested."""
    found = []
    for name, (wanted, required) in SUPPORTED.items():
        version = env.version(name)
        if version is None:
            if required:
                found.append(bad(f"{name} is not installed", f"{name}{wanted}", f"pip install '{name}{wanted}'"))
            continue
        # Local builds count as their release, and a release candidate as the version it precedes.
        if Version(version.base_version) in SpecifierSet(wanted):
            found.append(good(f"{name} {version}"))
        else:
            found.append(bad(f"{name} {version} is not supported", f"{name}{wanted}", f"pip install '{name}{wanted}'"))
    triton, fla = env.version("triton"), env.version("fla-core")
    if triton is not None and fla is not None and triton >= Version("3.9") and fla < Version("0.6"):
        # chunk_delta_h.py names BT in the key of a kernel that has no such argument.
        found.append(
            bad(
                f"fla-core {fla} does not import with Triton {triton}, which checks what autotuners name as keys",
                "fla-core 0.6 or later, or Triton before 3.9",
                "pip install 'fla-core>=0.6,<0.7'",
            )
        )
    return found


def autoload(env: Environment) -> Finding:
    """`import torch` reaches this package; without it ms-swift does not know the flag."""
    if env.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return bad(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from loading this package, so --gdn_impl is unknown",
            "the variable unset or 1",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    if "fla_safe" not in env.entry_points:
        return bad("fla_safe is not registered with PyTorch", "an installed package", "pip install fla-safe (or -e .)")
    return good("PyTorch loads fla_safe")


def fla_probe(env: Environment) -> Finding:
    """fla-core 0.5.0 and 0.5.1 run `import tilelang` at every call of two kernels (fla issue 1072, mended by 993)."""
    version = env.version("fla-core")
    if version is None or not Version("0.5.0") <= version < Version("0.5.2"):
        return good("FLA decides about its backends once")
    extra = ""
    if not env.on("FLA_TILELANG", "1"):
        extra = "; FLA_TILELANG=0 does not help, because availability is asked before the switch"
    return warn(
        f"fla-core {version} imports tilelang at every GDN call{extra}",
        "fla-core 0.4.2, 0.5.2 or later",
        "upgrade fla-core; with --gdn_impl fla_safe the question is asked once",
    )


def tilelang(env: Environment) -> Finding:
    """A TileLang that is installed but cannot be imported crashes FLA 0.5.2 on Hopper, and FLA 0.6.0 at import."""
    if env.tilelang in ("absent", "works"):
        return good(f"tilelang {env.tilelang}")
    version = env.version("fla-core")
    fatal = version is not None and (version >= Version("0.6") or (env.hopper and version >= Version("0.5.2")))
    # FLA catches ImportError alone; other exceptions come through to the caller.
    fatal = fatal or (version is not None and version >= Version("0.5") and not _is_import_error(env.tilelang))
    make = bad if fatal else warn
    return make(
        f"tilelang is installed but does not import: {env.tilelang}",
        "a tilelang that imports, or none",
        "pip uninstall tilelang, or install what it misses (FLA_TILELANG=0 is not enough)",
    )


def hopper_triton(env: Environment) -> Finding:
    """Triton 3.4 to 3.7.0 miscompile `chunk_bwd_dqkwg` on Hopper for some tile sizes (fla issue 640)."""
    triton, fla = env.version("triton"), env.version("fla-core")
    if triton is None or fla is None or not env.hopper or not Version("3.4") <= triton < Version("3.7.1"):
        return good("this GPU and Triton have no known miscompilation")
    if fla >= Version("0.5") and env.tilelang != "works":
        return bad(
            f"FLA {fla} refuses its backward on Hopper with Triton {triton}",
            "Triton 3.7.1 or later, or a working tilelang",
            "pip install -U 'triton>=3.8'",
        )
    return warn(
        f"Triton {triton} can give wrong gradients on Hopper, and FLA {fla} may not refuse it",
        "Triton 3.7.1 or later",
        "pip install -U 'triton>=3.8'",
    )


def mcore_gdn(env: Environment) -> Finding:
    """`USE_MCORE_GDN=0` builds GDN layers of transformers, which no Megatron plug-in can reach."""
    if env.on("USE_MCORE_GDN", "1"):
        return good("GDN layers are Megatron's")
    return bad(
        f"USE_MCORE_GDN={env.environ['USE_MCORE_GDN']} builds GDN layers outside Megatron: no packing, no TP, and slow",
        "USE_MCORE_GDN unset or 1",
        "unset USE_MCORE_GDN",
    )


def flash_qla(env: Environment) -> Finding:
    """FLA hands the whole operation to FlashQLA as soon as that package can be imported."""
    if env.flash_qla == "absent":
        return good("flash_qla absent")
    if not env.on("FLA_FLASH_QLA", "1"):
        return good("flash_qla is installed, and FLA_FLASH_QLA=0 keeps FLA from switching to it")
    broken = "" if env.flash_qla == "works" else f" (and it does not import: {env.flash_qla})"
    return warn(
        f"flash_qla is installed{broken}: stock FLA silently uses it where it supports the shape",
        "to know which kernel is measured",
        "set FLA_FLASH_QLA=0 when you compare with stock; --gdn_impl fla_safe chooses for itself and reports it",
    )


def variables(env: Environment) -> list[Finding]:
    """Variables that work against a frozen job."""
    found = []
    for name, trap, fatal, does, remedy in VARIABLES:
        value = env.environ.get(name, "")
        if value and value == (trap or value) and not (trap == "" and value in ("0", "disabled")):
            make = bad if fatal else warn
            found.append(make(f"{name}={value} {does}", f"{name} unset", remedy))
    return found or [good("no variable works against a frozen job")]


def fp_fusion(env: Environment) -> Finding:
    """Triton 3.10 will round differently from 3.9 unless the variable is set (its own warning)."""
    triton = env.version("triton")
    if triton is None or triton < Version("3.9") or "TRITON_DEFAULT_FP_FUSION" in env.environ:
        return good("fused multiply-add is not left to a changing default")
    return warn(
        f"Triton {triton} fuses multiply and add by a default that the next version changes",
        "the choice made by you",
        "set TRITON_DEFAULT_FP_FUSION=1 to keep today's results",
    )


def triton_cache(env: Environment) -> list[Finding]:
    """Triton's own cache: shared by ranks, on a network file system, or somebody else's."""
    named = env.environ.get("TRITON_CACHE_DIR")
    place = Path(named) if named else Path(env.environ.get("TRITON_HOME", str(env.home))) / ".triton" / "cache"
    found = []
    existing = next((p for p in [place, *place.parents] if p.exists()), Path("/"))
    kind = filesystem_type(existing)
    if kind in NETWORK_FILESYSTEMS:
        found.append(
            warn(
                f"Triton's cache {place} is on {kind}, where files of different ranks get mixed",
                "a local file system",
                "set TRITON_CACHE_DIR to a local directory; GDN kernels use fla-safe's own directories in any case",
            )
        )
    if existing == place and place.stat().st_uid != os.geteuid():
        found.append(
            bad(
                f"Triton's cache {place} belongs to user {place.stat().st_uid}, who can replace your kernels",
                "a directory of your own",
                "set TRITON_CACHE_DIR to a directory of your own",
            )
        )
    if named:
        found.append(
            warn(
                f"TRITON_CACHE_DIR={named} is shared by all ranks that inherit it",
                "a directory for each rank",
                "unset it; GDN kernels use fla-safe's own directories in any case, torch.compile's do not",
            )
        )
    return found or [good(f"Triton's cache {place} is local and yours")]


def artifact_root(env: Environment) -> Finding:
    """There is room for compiled kernels, in memory if possible."""
    try:
        root = choose_root()
        with suppress(FileNotFoundError):
            require_own_directory(root.path / f"fla-safe-{os.geteuid()}")
    except ArtifactError as error:
        return bad(error.seen, error.expected, error.remedy)
    if root.filesystem not in ("tmpfs", "ramfs"):
        return warn(
            f"compiled kernels go to {root.path} ({root.filesystem}), because /dev/shm has too little room",
            "512 MiB free in /dev/shm for each rank",
            "enlarge /dev/shm (docker: --shm-size=16g) or name a place with --gdn_cache_root",
        )
    return good(f"compiled kernels go to {root.path} ({root.free >> 20} MiB free in memory)")


def stale(env: Environment) -> Finding:
    """Directories of jobs that ended; the next start removes them."""
    try:
        places = find_stale(choose_root().path)
    except ArtifactError:
        return good("no directory to look in")
    if not places:
        return good("no directory of a dead job")
    return warn(
        f"{len(places)} directories of dead jobs, the first {places[0]}",
        "none",
        "nothing: the next job removes them (they hold memory until then)",
    )


def gpu(env: Environment) -> Finding:
    """The GPU, or the stand-in for it."""
    cpu = env.on("FLA_SAFE_CPU")
    if env.stamp.arch == "cpu":
        if cpu:
            return good("no GPU, and FLA_SAFE_CPU=1 stands in for it")
        return warn("no GPU", "a GPU, or FLA_SAFE_CPU=1 for tests", "see the driver, or set FLA_SAFE_CPU=1")
    if cpu:
        return bad("FLA_SAFE_CPU=1 on a machine with a GPU", "one of the two", "unset FLA_SAFE_CPU")
    if env.on("TRITON_INTERPRET"):
        return bad("TRITON_INTERPRET=1 on a machine with a GPU runs kernels in Python", "it unset", "unset it")
    return good(f"{env.stamp.device} ({env.stamp.arch}), driver {env.stamp.driver}")


def shipped_table(env: Environment) -> Finding:
    """A table that came with the package spares the first job its tuning."""
    if env.stamp.arch == "cpu":
        return good("no tuning without a GPU")
    for path in shipped_tables():
        try:
            stamp = DecisionTable.load(path).stamp
        except TableError as error:
            return bad(error.seen, error.expected, "reinstall fla-safe")
        if not any(m.severity == "refuse" for m in stamp.mismatches(env.stamp)):
            return good(f"shipped decisions {path.name} fit")
    return warn(
        f"no shipped decisions for {env.stamp.arch}, Triton {env.stamp.triton}, FLA {env.stamp.fla}",
        "a fitting table",
        "give a bundle with --gdn_bundle, or let the first job tune (minutes)",
    )


def _is_import_error(text: str) -> bool:
    return text.startswith(("ImportError", "ModuleNotFoundError"))


CHECKS: tuple[tuple[str, Check], ...] = (
    ("versions", versions),
    ("autoload", autoload),
    ("gpu", gpu),
    ("fla-probe", fla_probe),
    ("tilelang", tilelang),
    ("hopper-triton", hopper_triton),
    ("mcore-gdn", mcore_gdn),
    ("flash-qla", flash_qla),
    ("variables", variables),
    ("fp-fusion", fp_fusion),
    ("triton-cache", triton_cache),
    ("artifact-root", artifact_root),
    ("stale", stale),
    ("shipped-table", shipped_table),
)
