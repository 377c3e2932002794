"""A damaged, foreign or half-written artifact is a miss with one log line, a quarantine copy and the right kernel."""

import base64
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from fla_safe.runtime.artifacts import spill, triton_cache  # noqa: E402
from fla_safe.runtime.artifacts import store as artifacts  # noqa: E402
from fla_safe.runtime.artifacts.directories import remove_stale  # noqa: E402
from fla_safe.runtime.artifacts.groups import RECORD, DamageError, FileSeal, GroupRecord, check_group  # noqa: E402
from fla_safe.runtime.artifacts.roots import ArtifactSpaceError  # noqa: E402
from fla_safe.runtime.artifacts.store import ArtifactStore  # noqa: E402

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from tiny_kernels import add_kernel, compile_for_hopper, scale_kernel  # noqa: E402

KEY = "A" * 52


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "tritons_own"))
    place = tmp_path / "store"
    place.mkdir()
    store = ArtifactStore(place)
    remove = triton_cache.install(store)
    yield store
    remove()
    store.close()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A store that holds both kernels; copied by each test, so that the compiler runs once for the module."""
    place = tmp_path_factory.mktemp("pristine") / "store"
    place.mkdir()
    store = ArtifactStore(place)
    remove = triton_cache.install(store)
    with triton_cache.scope():
        kernels = {k: compile_for_hopper(k) for k in (add_kernel, scale_kernel)}
        variant = compile_for_hopper(add_kernel, 256)
    remove()
    store.prune()
    # Kept apart: the entry of the same kernel with another block size, which has the same file names.
    entry = base64.b32encode(bytes.fromhex(variant.hash)).decode().rstrip("=")
    (place / "entries" / entry).rename(place / "variant")
    return place, {k: v.asm["cubin"] for k, v in kernels.items()}


def compile_in(store, kernel=add_kernel):
    with triton_cache.scope():
        return compile_for_hopper(kernel)


def entry_of(store, name):
    return next(p.parent for p in store.directory.glob(f"entries/*/{name}.json"))


def rewrite_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def reseal(entry, name, text):
    """Change a file and make the record fit, as a careless tool that rewrites manifests would."""
    (entry / name).write_bytes(text)
    rewrite_json(entry / RECORD, lambda d: d["files"].__setitem__(name, [len(text), FileSeal.of(text).sha256]))


def swap_files(entry, other, a, b):
    first, second = (entry / a).read_bytes(), (other / b).read_bytes()
    (entry / a).write_bytes(second)
    (other / b).write_bytes(first)


def replace_metadata(entry, **values):
    data = json.loads((entry / "add_kernel.json").read_text()) | values
    reseal(entry, "add_kernel.json", json.dumps(data).encode())


def replace_by_other(entry, other):
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


DAMAGE = {
    "binary missing": lambda e, o: (e / "add_kernel.cubin").unlink(),
    "binary empty": lambda e, o: (e / "add_kernel.cubin").write_bytes(b""),
    "binary truncated": lambda e, o: os.truncate(e / "add_kernel.cubin", 100),
    "binary, one bit": lambda e, o: flip(e / "add_kernel.cubin"),
    "binary of another kernel": lambda e, o: swap_files(e, o, "add_kernel.cubin", "scale_kernel.cubin"),
    "metadata missing": lambda e, o: (e / "add_kernel.json").unlink(),
    "metadata empty": lambda e, o: (e / "add_kernel.json").write_bytes(b""),
    "metadata truncated": lambda e, o: os.truncate(e / "add_kernel.json", 20),
    "metadata of another kernel": lambda e, o: reseal(e, "add_kernel.json", (o / "scale_kernel.json").read_bytes()),
    "metadata a list": lambda e, o: reseal(e, "add_kernel.json", b"[1, 2]"),
    "metadata not UTF-8": lambda e, o: reseal(e, "add_kernel.json", b'{"name": "\xff\xfe"}'),
    "metadata with a number for its target": lambda e, o: replace_metadata(e, target=90),
    "metadata of another Triton": lambda e, o: replace_metadata(e, triton_version="2.1.0"),
    "record missing": lambda e, o: (e / RECORD).unlink(),
    "record empty": lambda e, o: (e / RECORD).write_bytes(b""),
    "record truncated": lambda e, o: os.truncate(e / RECORD, 30),
    "record not UTF-8": lambda e, o: (e / RECORD).write_bytes(b"\xff\xfe{}"),
    "record with text for a size": lambda e, o: rewrite_json(e / RECORD, lambda d: d["files"].update(x=["1", "2"])),
    "record with a path for a file": lambda e, o: rewrite_json(
        e / RECORD, lambda d: d["files"].update({"../../x": [1, "0" * 64]})
    ),
    "record without its binary": lambda e, o: rewrite_json(e / RECORD, lambda d: d["files"].pop("add_kernel.cubin")),
    "record of another Triton": lambda e, o: rewrite_json(e / RECORD, lambda d: d.update(triton="2.1.0")),
    "whole group of another entry": replace_by_other,
    "whole group of the same kernel with another block size": lambda e, o: replace_by_other(
        e, e.parents[1] / "variant"
    ),
    "whole group of another Triton": lambda e, o: (
        replace_metadata(e, triton_version="2.1.0"),
        rewrite_json(e / RECORD, lambda d: d.update(triton="2.1.0")),
    ),
    "binary a directory": lambda e, o: ((e / "add_kernel.cubin").unlink(), (e / "add_kernel.cubin").mkdir()),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_miss_with_the_right_kernel(name, pristine, store, caplog):
    place, binaries = pristine
    shutil.copytree(place / "variant", store.directory / "variant")
    shutil.copytree(place / "entries", store.directory / "entries", dirs_exist_ok=True)
    entry = entry_of(store, "add_kernel")
    DAMAGE[name](entry, entry_of(store, "scale_kernel"))
    with caplog.at_level(logging.WARNING, "fla_safe"):
        kernel = compile_in(store)
    assert kernel.asm["cubin"] == binaries[add_kernel]
    assert kernel.metadata.name == "add_kernel"
    assert [r for r in caplog.records if "damaged artifact" in r.message and entry.name in r.message]
    assert len(caplog.records) == 1
    assert len(list((store.directory / "quarantine").iterdir())) == 1
    assert store.counts.written == 1
    # What was compiled in place of it is whole, and the next process finds it.
    assert check_group(entry, entry.name, "add_kernel.json", triton.__version__) is not None
    assert compile_in(store).asm["cubin"] == binaries[add_kernel]
    assert store.counts.hits == 1


def test_a_moved_store_stays_warm(pristine, tmp_path):
    place, binaries = pristine
    shutil.copytree(place, tmp_path / "elsewhere")
    store = ArtifactStore(tmp_path / "elsewhere")
    remove = triton_cache.install(store)
    try:
        assert compile_in(store).asm["cubin"] == binaries[add_kernel]
    finally:
        remove()
    assert (store.counts.hits, store.counts.damaged, store.counts.written) == (1, 0, 0)


def test_undamaged_groups_cost_no_log_line(pristine, store, caplog):
    shutil.copytree(pristine[0] / "entries", store.directory / "entries", dirs_exist_ok=True)
    assert len(list(store.groups())) == 2
    compile_in(store), compile_in(store, scale_kernel)
    assert store.counts.hits == 2
    assert not caplog.records


def test_only_the_scope_is_routed_and_inductors_variable_is_left_alone(store, tmp_path, monkeypatch):
    """Inductor sets TRITON_CACHE_DIR when it is unset; kernels in and outside the scope must not notice each other."""
    own = tmp_path / "tritons_own"
    compile_in(store)
    assert not own.exists()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductors"))
    compile_for_hopper(scale_kernel)
    assert list((tmp_path / "inductors").glob("*/scale_kernel.cubin"))
    compile_in(store)
    assert store.counts.hits == 1
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "inductors")
    assert "TRITON_CACHE_MANAGER" not in os.environ


def test_scope_belongs_to_its_thread(store):
    seen = []
    with triton_cache.scope():
        thread = threading.Thread(target=lambda: seen.append(type(triton.knobs.cache.manager_class(KEY)).__name__))
        thread.start()
        thread.join()
        seen.append(type(triton.knobs.cache.manager_class(KEY)).__name__)
    assert seen == ["FileCacheManager", "StoreCacheManager"]


def test_removal_gives_the_former_manager_back(tmp_path, monkeypatch):
    class Former(triton.runtime.cache.FileCacheManager):
        pass

    monkeypatch.setitem(vars(triton.knobs.cache), "manager_class", Former)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "c"))
    remove = triton_cache.install(ArtifactStore(tmp_path))
    assert isinstance(triton.knobs.cache.manager_class(KEY), Former)
    remove()
    remove()
    assert triton.knobs.cache.manager_class is Former
    assert triton_cache.installed() is None


def test_a_second_store_is_refused(store, tmp_path):
    with pytest.raises(triton_cache.CacheInstallError, match="already"):
        triton_cache.install(store)


def test_compiled_launchers_are_checked_too(store):
    manager = triton_cache.StoreCacheManager(store, KEY)
    path = manager.put(b"\x7fELF launcher", "__triton_launcher.so")
    assert manager.get_file("__triton_launcher.so") == path
    os.truncate(path, 4)  # loading this would crash the process
    assert manager.get_file("__triton_launcher.so") is None
    assert store.counts.damaged == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=["disk full", "quota", "read-only"])
def test_no_room_means_unsaved_but_compiled(code, store, monkeypatch, caplog):
    real = artifacts.write_new

    def write(path, data):
        if store.directory in path.parents and path.name.endswith(".cubin"):
            raise OSError(code, os.strerror(code))
        return real(path, data)

    monkeypatch.setattr(artifacts, "write_new", write)
    assert compile_in(store).metadata.name == "add_kernel"
    assert list(store.groups()) == []
    assert store.counts.written == 0
    assert "takes no more files" in caplog.text
    monkeypatch.undo()
    assert compile_in(store).metadata.name == "add_kernel"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_a_file_system_without_links_means_unsaved_but_compiled(code, store, monkeypatch, caplog):
    def link(*args, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(artifacts.os, "link", link)
    assert compile_in(store).metadata.name == "add_kernel"
    assert list(store.groups()) == []
    assert len([r for r in caplog.records if "is not kept" in r.message]) == 1


SPILLER = """
import os, pathlib, sys
from fla_safe.runtime.artifacts.spill import Spill
place = pathlib.Path(sys.argv[1])
print(Spill(place, place).write("k.cubin", b"x", OSError(28, "No space left on device")), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_spilled_is_cleared(tmp_path):
    done = subprocess.run([sys.executable, "-c", SPILLER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    spilled = Path(done.stdout.strip())
    assert spilled.read_bytes() == b"x"
    assert remove_stale(tmp_path, keep_job="mine") == (spilled.parent,)
    assert not spilled.exists()


def test_no_room_anywhere_is_a_named_error(store, monkeypatch):
    def write(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "write_new", write)
    monkeypatch.setattr(spill, "write_new", write)
    with pytest.raises(ArtifactSpaceError, match="No space left"):
        compile_in(store)
    assert list(store.groups()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only directories")
def test_read_only_directory_is_a_named_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArtifactSpaceError):
        ArtifactStore(tmp_path)


def test_a_full_tmpfs_is_survived(tmp_path):
    """The real thing: a file system of 64 KiB. Runs where the kernel lets an ordinary user mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]);"
        "from tiny_kernels import compile_for_hopper, add_kernel, scale_kernel;"
        "from fla_safe.runtime.artifacts.store import ArtifactStore;"
        "from fla_safe.runtime.artifacts import triton_cache;"
        "s = ArtifactStore(pathlib.Path(sys.argv[1])); triton_cache.install(s);"
        "c = triton_cache.scope(); c.__enter__();"
        "[compile_for_hopper(k, b) for b in (64, 128, 256) for k in (add_kernel, scale_kernel)];"
        "print('whole', len(list(s.groups())), 'damaged', s.counts.damaged)"
    )
    command = (
        f"mount -t tmpfs -o size=64k none {mount} && "
        f'TRITON_CACHE_DIR={tmp_path}/c {sys.executable} -c "{script}" {mount} {HERE}'
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=100)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no private mount: {done.stderr.strip()[:100]}")
    assert done.returncode == 0, done.stderr
    assert "damaged 0" in done.stdout
    assert 0 < int(done.stdout.split()[1]) < 6


WRITER = """
import pathlib, sys
from fla_safe.runtime.artifacts.store import ArtifactStore
from fla_safe.runtime.artifacts.groups import FileSeal, GroupRecord
import base64, hashlib, json
store = ArtifactStore(pathlib.Path(sys.argv[1]), triton="3.6.0")
print("ready", flush=True)
for i in range(100000):
    digest = hashlib.sha256(b"%d" % i)
    key = base64.b32encode(digest.digest()).decode().rstrip("=")
    meta = json.dumps({"hash": digest.hexdigest(), "target": {}, "name": "k"}).encode()
    files = {"k.json": meta, "k.cubin": b"c" * 100_000}
    for name, data in files.items():
        store.stage(f"w{i}", name, data)
    store.publish(f"w{i}", GroupRecord(key, "k.json", "3.6.0", tuple((n, FileSeal.of(d)) for n, d in files.items())))
"""


@pytest.mark.parametrize("milliseconds", [3, 17, 40, 90])
def test_sigkill_leaves_only_whole_groups(milliseconds, tmp_path, caplog):
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(milliseconds / 1000)
    child.send_signal(signal.SIGKILL)
    child.wait()
    store = ArtifactStore(tmp_path, triton="3.6.0")
    entries = list((tmp_path / "entries").iterdir())
    assert len(list(store.groups())) == len(entries)
    assert store.counts.damaged == 0
    assert not caplog.records
    assert list((tmp_path / "staging").iterdir()) == []


def test_threads_that_compile_one_kernel_leave_one_whole_group(store):
    errors = []

    def work():
        try:
            compile_in(store)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert errors == []
    assert len(list(store.groups())) == 1
    assert store.counts.damaged == 0


def test_prune_forgets_losers_and_texts(pristine, store):
    compile_in(store), compile_in(store, scale_kernel)
    kept = entry_of(store, "add_kernel").name
    assert store.prune(keep={kept}) > 0
    assert [r.key for r in store.groups()] == [kept]
    assert not list(store.directory.rglob("*.ptx"))


def test_quarantine_is_bounded(store):
    for i in range(40):
        entry = store.directory / "entries" / KEY
        entry.mkdir()
        (entry / "x").write_text(str(i))
        assert store.load_group(KEY, "x.json") is None
    assert len(list((store.directory / "quarantine").iterdir())) == 32


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(deadline=None, max_examples=300)
def test_fuzzed_records_are_damage_and_nothing_else(text):
    with pytest.raises(DamageError):
        GroupRecord.from_json(text)


@given(data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_fields_of_a_valid_record(data):
    seal = FileSeal.of(b"x")
    record = GroupRecord(KEY, "k.json", "3.6.0", (("k.json", seal), ("k.cubin", seal)))
    good = json.loads(record.to_json())
    assert GroupRecord.from_json(record.to_json().encode()) == record
    where = data.draw(st.sampled_from(sorted(good)))
    good[where] = data.draw(json_values)
    try:
        parsed = GroupRecord.from_json(json.dumps(good).encode())
    except DamageError:
        return
    assert parsed.name in dict(parsed.files)
    assert all("/" not in name and name not in ("", ".", "..") for name, _ in parsed.files)


OTHERS = [p for p in os.environ.get("FLA_SAFE_TEST_TRITONS", "").split(os.pathsep) if p]


@pytest.mark.parametrize("place", OTHERS or [pytest.param("", marks=pytest.mark.skip("FLA_SAFE_TEST_TRITONS unset"))])
def test_other_tritons(place):
    """`FLA_SAFE_TEST_TRITONS`: directories made with `pip install --no-deps --target DIR triton==X`, as in PATH."""
    environ = {k: v for k, v in os.environ.items() if k != "FLA_SAFE_TEST_TRITONS"} | {"PYTHONPATH": place}
    select = "damage_is_a_miss or moved_store or only_the_scope or threads_that"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", select]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:]
