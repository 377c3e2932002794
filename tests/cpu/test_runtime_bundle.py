"""A bundle works from any path; anything tampered with, unsafe or made for other hardware is refused by name."""

import base64
import hashlib
import io
import json
import os
import shutil
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.artifacts import bundle
from fla_safe.runtime.artifacts.bundle import BundleDamagedError, BundleError, BundleUnsafeError
from fla_safe.runtime.artifacts.groups import RECORD, FileSeal, GroupRecord
from fla_safe.runtime.artifacts.store import ArtifactStore
from fla_safe.runtime.tuning.decisions import (
    Decision,
    DecisionTable,
    MergeConflictError,
    Stamp,
    StampMismatchError,
    TuningKey,
)

STAMP = Stamp("sm_90", "3.8.0", "0.6.0")


def group(seed, triton="3.8.0"):
    digest = hashlib.sha256(str(seed).encode())
    key = base64.b32encode(digest.digest()).decode().rstrip("=")
    metadata = {"hash": digest.hexdigest(), "target": {"backend": "cuda"}, "name": "k", "triton_version": triton}
    files = {"k.cubin": b"\x7fELF" + bytes(1000) + str(seed).encode(), "k.json": json.dumps(metadata).encode()}
    return GroupRecord(key, "k.json", triton, tuple((n, FileSeal.of(d)) for n, d in files.items())), files


def table(warps=4, *names):
    made = DecisionTable(STAMP)
    for name in names or ("x",):
        made.put(TuningKey.of(f"m.{name}", {"H": 1}), Decision(num_warps=warps), verified=True)
    return made


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "b.flasafe"
    bundle.pack(path, table(), [group(1), group(2)])
    return path


def rebuild(path, change, *, attr=None):
    """Write the archive again with other members."""
    with zipfile.ZipFile(path) as archive:
        members = [(i.filename, archive.read(i)) for i in archive.infolist()]
    members = change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = (attr or {}).get(name, 0o644) << 16
            archive.writestr(info, data)


def test_round_trip_through_another_path_and_store(packed, tmp_path):
    moved = tmp_path / "deep" / "er.zip"
    moved.parent.mkdir()
    shutil.move(packed, moved)
    found = bundle.verify(moved, STAMP)
    assert found.table.hash() == table().hash()
    assert {found.table.entry(k).source for k in found.table} == {"bundle"}
    store = ArtifactStore(tmp_path, triton="3.8.0")
    assert store.seed(found.groups) == 2
    assert [r.key for r in store.groups()] == sorted(g[0].key for g in (group(1), group(2)))
    again = bundle.pack(tmp_path / "again", found.table, ((r, store.read(r)) for r in store.groups()))
    assert {r.key for r, _ in again.groups} == {r.key for r, _ in found.groups}


def test_equal_contents_give_equal_bytes_whatever_the_order(tmp_path):
    a = bundle.pack(tmp_path / "a", table(), [group(1), group(2)])
    b = bundle.pack(tmp_path / "b", table(), [group(2), group(1)])
    assert a.id == b.id == bundle.read(tmp_path / "a").id
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_user_may_read_it(packed):
    assert packed.stat().st_mode & 0o777 == 0o644


def test_nothing_absolute_is_inside(packed):
    with zipfile.ZipFile(packed) as archive:
        assert not any(str(packed.parent).encode() in archive.read(n) for n in archive.namelist())


def test_unpack_writes_what_was_packed(packed, tmp_path):
    bundle.unpack(packed, tmp_path / "out")
    record, files = group(1)
    assert (tmp_path / "out" / "artifacts" / record.key / "k.cubin").read_bytes() == files["k.cubin"]
    assert DecisionTable.load(tmp_path / "out" / "table.json").hash() == table().hash()
    with pytest.raises(BundleError, match="not empty"):
        bundle.unpack(packed, tmp_path / "out")


@pytest.mark.parametrize("field", ["arch", "triton", "fla"])
def test_other_hardware_or_versions_are_refused_by_name(field, packed):
    running = Stamp(**STAMP.as_dict() | {field: "other"})
    with pytest.raises(StampMismatchError, match=rf"b\.flasafe.*{field} {getattr(STAMP, field)} where other"):
        bundle.verify(packed, running)


def test_expected_id(packed):
    found = bundle.read(packed)
    assert bundle.read(packed, expect_id=found.id[:16]).id == found.id
    for wrong in ("0" * 64, found.id[:4], ""):
        with pytest.raises(BundleDamagedError):
            bundle.read(packed, expect_id=wrong)


ARTIFACT = f"artifacts/{group(1)[0].key}/k.cubin"


def replace(name, data):
    return lambda members: [(n, data if n == name else d) for n, d in members]


def drop(name):
    return lambda members: [(n, d) for n, d in members if n != name]


def add(name, data=b"x"):
    return lambda members: [*members, (name, data)]


def edit_manifest(change):
    def apply(members):
        out = []
        for name, data in members:
            if name == "MANIFEST.json":
                body = json.loads(data)
                change(body)
                data = json.dumps(body).encode()
            out.append((name, data))
        return out

    return apply


def swap(members):
    first, second = (f"artifacts/{group(i)[0].key}/k.cubin" for i in (1, 2))
    contents = dict(members)
    contents[first], contents[second] = contents[second], contents[first]
    return list(contents.items())


def swap_and_reseal(members):
    """Exchange two binaries and make the manifest fit: the groups' own records still tell."""
    members = swap(members)
    contents = dict(members)

    def fit(body):
        body["files"] = {n: [len(contents[n]), hashlib.sha256(contents[n]).hexdigest()] for n in body["files"]}

    return edit_manifest(fit)(members)


TAMPERING = {
    "binary changed": (replace(ARTIFACT, b"evil"), BundleDamagedError),
    "binary changed, same size": (replace(ARTIFACT, b"y" * len(group(1)[1]["k.cubin"])), BundleDamagedError),
    "binaries swapped": (swap, BundleDamagedError),
    "binaries swapped, manifest made to fit": (swap_and_reseal, BundleDamagedError),
    "table changed": (replace("table.json", table(8).to_json().encode()), BundleDamagedError),
    "table missing": (drop("table.json"), BundleDamagedError),
    "manifest missing": (drop("MANIFEST.json"), BundleDamagedError),
    "manifest a list": (replace("MANIFEST.json", b"[]"), BundleDamagedError),
    "manifest not UTF-8": (replace("MANIFEST.json", b"\xff"), BundleDamagedError),
    "manifest of another stamp": (edit_manifest(lambda b: b["stamp"].update(arch="sm_100")), BundleDamagedError),
    "manifest with text sizes": (
        edit_manifest(lambda b: b["files"].update({ARTIFACT: ["1", "x"]})),
        BundleDamagedError,
    ),
    "manifest with huge size": (
        edit_manifest(lambda b: b["files"].update({ARTIFACT: [1 << 60, ""]})),
        BundleDamagedError,
    ),
    "record missing": (drop(f"artifacts/{group(1)[0].key}/{RECORD}"), BundleDamagedError),
    "file missing": (drop(ARTIFACT), BundleDamagedError),
    "file more": (add(f"artifacts/{group(3)[0].key}/k.cubin"), BundleDamagedError),
    "path upwards": (add("artifacts/../../x"), BundleUnsafeError),
    "path upwards inside": (add(f"artifacts/{group(1)[0].key}/.."), BundleUnsafeError),
    "absolute path": (add("/etc/passwd"), BundleUnsafeError),
    "backslashes": (add(f"artifacts/{group(1)[0].key}/..\\..\\x"), BundleUnsafeError),
    "foreign name": (add("setup.py"), BundleUnsafeError),
    "name twice": (add("table.json", table(8).to_json().encode()), BundleUnsafeError),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_refused_and_nothing_is_written(name, packed, tmp_path):
    change, error = TAMPERING[name]
    rebuild(packed, change)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(error, match=r"Expected: .*To do: "):
        bundle.unpack(packed, tmp_path / "out")
    assert sorted(p for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("whole", [True, False])
def test_unusual_compression_is_refused(packed, method, whole):
    """Their decoders take memory as the file says, and raise what no reader of zip files expects."""
    with zipfile.ZipFile(packed) as archive:
        members = [(i.filename, archive.read(i)) for i in archive.infolist()]
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members:
            archive.writestr(name, data, method)
    if not whole:
        text = bytearray(packed.read_bytes())
        text[60] ^= 0xFF
        packed.write_bytes(text)
    with pytest.raises(BundleUnsafeError, match="compressed by method"):
        bundle.read(packed)


def test_a_link_is_refused(packed):
    rebuild(packed, lambda m: m, attr={ARTIFACT: 0o120777})
    with pytest.raises(BundleUnsafeError, match="link"):
        bundle.read(packed)


def test_a_member_that_inflates_is_stopped_early(packed):
    rebuild(packed, replace(ARTIFACT, bytes(300 << 20)))
    with pytest.raises(BundleUnsafeError, match="larger than"):
        bundle.read(packed)


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "empty archive"])
def test_other_files_are_refused(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(BundleDamagedError):
        bundle.read(tmp_path / "x")


def test_absent_and_unreadable(tmp_path):
    with pytest.raises(BundleError, match="no bundle"):
        bundle.read(tmp_path / "absent")
    with pytest.raises(BundleError):
        bundle.read(tmp_path)


def test_pack_that_cannot_finish_leaves_the_old_file(packed, monkeypatch):
    old = packed.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(BundleError, match="No space left"):
        bundle.pack(packed, table(8))
    assert packed.read_bytes() == old
    assert os.listdir(packed.parent) == [packed.name]


def test_pack_refuses_half_a_group_and_another_tritons(tmp_path):
    record, files = group(1)
    with pytest.raises(BundleDamagedError, match=r"k\.cubin"):
        bundle.pack(tmp_path / "b", table(), [(record, {"k.json": files["k.json"]})])
    with pytest.raises(BundleDamagedError, match=r"3\.6\.0"):
        bundle.pack(tmp_path / "b", table(), [group(1, "3.6.0")])
    assert os.listdir(tmp_path) == []


def test_merge(tmp_path):
    bundle.pack(tmp_path / "a", table(4, "x", "y"), [group(1), group(2)])
    bundle.pack(tmp_path / "b", table(8, "y", "z"), [group(2), group(3)])
    with pytest.raises(MergeConflictError):
        bundle.merge(tmp_path / "c", [tmp_path / "a", tmp_path / "b"])
    assert not (tmp_path / "c").exists()
    _, conflicts = bundle.merge(tmp_path / "c", [tmp_path / "a", tmp_path / "b"], "keep")
    found = bundle.read(tmp_path / "c")
    assert {k.kernel: found.table.get(k).num_warps for k in found.table} == {"m.x": 4, "m.y": 4, "m.z": 8}
    assert len(found.groups) == 3
    assert [c.key.kernel for c in conflicts] == ["m.y"]


def test_seed_leaves_out_what_is_wrong_and_keeps_what_it_has(tmp_path, caplog):
    store = ArtifactStore(tmp_path, triton="3.8.0")
    record, files = group(1)
    assert store.seed([(record, files | {"k.cubin": b"bad"}), group(2, "3.6.0"), group(3), group(3)]) == 1
    assert len(caplog.records) == 2
    assert [r.key for r in store.groups()] == [group(3)[0].key]


VALID = io.BytesIO()


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_damaged_byte_is_refused_or_harmless(tmp_path_factory, data):
    if not VALID.getvalue():
        path = tmp_path_factory.mktemp("fuzz") / "b"
        bundle.pack(path, table(), [group(1)])
        VALID.write(path.read_bytes())
    text = bytearray(VALID.getvalue())
    where = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        del text[where : where + data.draw(st.integers(1, 50))]
    else:
        text[where] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(text)
    try:
        found = bundle.read(path)
    except FlaSafeError:
        return
    assert found.table.hash() == table().hash()
    assert found.groups == (group(1),)
