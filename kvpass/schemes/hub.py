"""Stores calibrations in repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import huggingface_hub

from ..errors import KVPassError

PREFIX = "hub:"
_NAME = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<folder>[\w./-]+))?(?:@(?P<revision>[^@]+))?")


class HubName(NamedTuple):
    """A name of the form ``hub:owner/name[/folder][@revision]``."""

    repo: str
    folder: str = ""
    revision: str | None = None

    @classmethod
    def of(cls, name: str) -> HubName:
        """Raises `KVPassError` if ``name`` does not have that form."""
        found = _NAME.fullmatch(name)
        if found is None or ".." in name:
            raise KVPassError(f"{name!r} is not of the form hub:owner/name[/folder][@revision].")
        return cls(found["repo"], found["folder"] or "", found["revision"])


def downloaded(name: str, files: tuple[str, ...]) -> Path:
    """The folder that holds ``files`` of the repository ``name``, all of one commit. What was downloaded before is
    used again, also without a network. Raises `KVPassError` if the files cannot be downloaded."""
    repo, folder, revision = HubName.of(name)
    patterns = [f"{folder}/{file}" if folder else file for file in files]
    try:
        root = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except Exception as error:  # huggingface_hub's and its connections' errors have no common base
        raise KVPassError(
            f"{name} cannot be downloaded: {error}. Check the name, the network and, for a private repository, the "
            "login (hf auth login)."
        ) from error
    return Path(root) / folder


def uploaded(folder: Path, name: str, files: tuple[str, ...], private: bool) -> str:
    """Upload ``files`` of ``folder`` to the repository ``name`` in one commit, creating the repository if needed.
    Returns the address of the commit. Raises `KVPassError` if that fails."""
    repo, path, revision = HubName.of(name)
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, path_in_repo=path or None, revision=revision, allow_patterns=list(files),
            commit_message="Add a calibration of kvpass",
        )  # fmt: skip
    except Exception as error:
        raise KVPassError(f"Cannot upload to {name}: {error}. Log in first: hf auth login.") from error
    return str(commit)
