"""The key file: racing engines agree on one, and a file that is not ours alone is refused in one line."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.transport.control import key_file
from kvferry.transport.control.key_file import default_key_file, make_key_file, read_key_file, shared_key
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.errors import ConfigError
from tests.doctor.planted import NOBODY, as_nobody
from tests.support.fork_server import fork_server

SECRET = new_secret()


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_processes_that_start_at_once_agree_on_one_key(runtime):
    script = "from kvferry.transport.control.key_file import shared_key; print(shared_key())"
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    with ThreadPoolExecutor(8) as pool:
        started = pool.map(lambda _: fork_server().run("-c", script, environment=environment, timeout=800), range(8))
        runs = list(started)
    assert len({run.stdout.strip() for run in runs}) == 1 and len(runs[0].stdout.strip()) == 64, runs[0].stderr
    assert [path.name for path in runtime.iterdir()] == ["kvferry.key"], "no draft is left"
    assert stat.S_IMODE((runtime / "kvferry.key").stat().st_mode) == 0o600


def refused(path, *words):
    with pytest.raises(ConfigError) as error:
        read_key_file(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and SECRET not in text
    assert all(word in text for word in words)


CONTENTS = (b"", SECRET[:20].encode(), b"\n" * 65, b"%" * 64, SECRET.encode() + b"x", bytes(99))


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(content, 0o600, ("contains no key", f"{len(content)} bytes")) for content in CONTENTS]
    + [(SECRET.encode(), mode, (f"{mode:04o}", "0600")) for mode in (0o640, 0o604, 0o660, 0o644)],
    ids=map(str, range(10)),
)
def test_a_file_without_a_key_or_that_others_may_read(tmp_path, content, mode, words):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 0, NOBODY)  # a group that this process is not in
    refused(path, *words)


def test_a_folder_a_fifo_and_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "folder", "regular file")
    refused(tmp_path / "fifo", "regular file")
    refused(tmp_path / "loop", "cannot be used")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read_key_file(tmp_path / "dangling")


@pytest.fixture
def secret(tmp_path):
    """A Secret as the kubelet mounts it: the key is a link into a folder that another link names."""
    tmp_path.chmod(0o755)
    (tmp_path / "..2026_11_26").mkdir()
    make_key_file(tmp_path / "..2026_11_26" / "key")
    (tmp_path / "..data").symlink_to("..2026_11_26")
    (tmp_path / "key").symlink_to("..data/key")
    return tmp_path / "key"


def test_links_of_this_user_lead_to_the_key(secret):
    assert read_key_file(secret) == secret.read_text().strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize(
    ("mode", "group", "words"),
    [(0o440, 0, None), (0o640, 0, None), (0o440, NOBODY, ("0440",)), (0o444, 0, ("0444",)), (0o460, 0, ("0460",))],
    ids=["fsGroup", "default", "other-group", "all", "group-writes"],
)
def test_a_kubernetes_secret_of_root_for_another_user(secret, mode, group, words):
    """``fsGroup`` is a group of the engine: of this process it is root's."""
    secret.chmod(mode)
    os.chown(secret, 0, group)
    for folder in secret.parents[:-2]:  # all below the system's folder of temporary files
        folder.chmod(0o755)
    text = secret.read_text().strip()
    with as_nobody():
        if words is None:
            assert read_key_file(secret) == text
        elif mode & 0o004 or group == 0:
            refused(secret, *words)
        else:  # the kernel refuses
            refused(secret, "Permission denied")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_files_and_links_of_another_user_are_refused(secret):
    os.chown(secret, NOBODY, NOBODY)
    refused(secret, f"belongs to user {NOBODY}; expected 0, who runs this engine, or root")
    os.chown(secret, 0, 0)
    os.chown(secret, NOBODY, NOBODY, follow_symlinks=False)
    refused(secret, f"is a symbolic link of user {NOBODY}; expected 0")


def test_a_host_without_a_runtime_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative/path")
    monkeypatch.setattr(key_file, "is_private", lambda path: "run" not in path.parts and is_private(path))
    own = tmp_path / f"kvferry-{os.geteuid()}"
    assert default_key_file() == own / "kvferry.key" and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=f"key_file: {own} is not a directory that only user"):
        shared_key()
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"remove it, or set key_file"):
        shared_key()


is_private = key_file.is_private


def test_a_runtime_directory_that_others_may_write_is_passed_over(runtime, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    runtime.chmod(0o777)
    assert default_key_file().parent != runtime


def test_keygen(tmp_path):
    def keygen(path):
        return CliRunner().invoke(app, ["keygen", str(path)])

    done = keygen(tmp_path / "key")
    secret = read_key_file(tmp_path / "key")
    keys = Keys(secret)
    assert done.exit_code == 0 and f"\n    {keys.public}  {keys.fingerprint}\n" in done.stdout
    assert secret not in done.stdout and all(re.fullmatch("[0-9a-f]{64}", key) for key in (secret, keys.public))
    assert "KVFERRY_KEY_FILE=" in done.stdout and "KVFERRY_PEER_KEYS" in done.stdout
    again = keygen(tmp_path / "key")
    assert again.exit_code == 1 and "exists already, and nothing was changed" in again.stderr
    assert f"{keys.public}, fingerprint {keys.fingerprint}" in again.stderr
    nowhere = keygen(tmp_path / "no" / "key")
    assert nowhere.exit_code == 2 and "cannot be written" in nowhere.stderr and "Traceback" not in nowhere.stderr
    assert read_key_file(tmp_path / "key") == secret
    for file in ("", ".", "/"):
        done = keygen(file)
        assert done.exit_code == 2 and done.stderr == "kvferry: FILE is empty or a folder; name a file\n"
