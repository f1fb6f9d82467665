"""Models of the hub, through huggingface_hub.

`stand_in` costs little: the small files of a model come into the hub's own cache, and of its weight
files the headers alone (see checkpoints/remote.py), which every check before a merge reads. Then
`bring` downloads the weight files that are needed whole into the same cache, where other programs
find them, and which continues a download that was interrupted. Of a file from which few tensors are
needed those come by range. `push` uploads a finished folder in one commit.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.checkpoints.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from sigmerge.checkpoints.folder import INDEX, SHARD, SINGLE, on_hub, weight_map
from sigmerge.checkpoints.remote import COPIED_WHOLE, LARGEST_COPY, linked_stand_in
from sigmerge.errors import MissingExtra, OutputError, RecipeError, SigmergeError
from sigmerge.files.objects import SHA256, RemoteFile, linked_folder, remote_file, remote_folder
from sigmerge.progress import shown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DOWNLOADED_TOGETHER = 4
"""Weight files that are downloaded at a time."""
_HIDDEN = (".cache", ".git")
"""Folders in a result that are not uploaded."""


def cached(identifier: str) -> Path | None:
    """The whole snapshot of `owner/name` that the hub's cache holds; nothing is downloaded."""
    folder = snapshot(identifier)
    return folder if folder and _is_whole(folder) else None


def snapshot(identifier: str) -> Path | None:
    """What the hub's cache holds of `owner/name`, whole or not; nothing is downloaded."""
    _library(identifier)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, revision = _named(identifier)
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def stand_in(identifier: str) -> Path:
    """The snapshot of `owner/name` or `owner/name@revision`, or what stands in for it."""
    if here := cached(identifier):
        return here
    from huggingface_hub import snapshot_download

    name, revision = _named(identifier)
    with _reaching(identifier) as api:
        info = api.model_info(name, revision=revision, files_metadata=True)
        files = {one.rfilename: one for one in info.siblings or ()}
        small = [n for n, one in files.items() if _is_small(n, one.size or 0)]
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[_literally(n) for n in small],
                endpoint=api.endpoint,
                tqdm_class=_silent_bar(),
            )
        )
        weights = _weights(folder, files)
        pickles = sorted(n for n in files if n.endswith((".bin", ".pt", ".pth")) and "/" not in n)
        if not weights and pickles:
            raise RecipeError(
                f"{identifier!r}: the hub has no safetensors weights of it, only pickles "
                f"({pickles[0]}), which can run code when loaded. Download it yourself, and give "
                "its folder with --allow-pickle."
            )
        if missing := [n for n in weights if n not in files]:
            raise RecipeError(f"{identifier!r}: its index names {missing[0]}, which the hub has "
                              "not; its upload may not be finished.")  # fmt: skip
        if not weights:  # a tokenizer alone, perhaps; who needs weights says so
            return folder
        url = f"hf://{name}@{info.sha}"
        objects = {}
        for weight in weights:
            one = files[weight]
            version = SHA256 + one.lfs.sha256 if one.lfs else str(one.blob_id)
            objects[weight] = RemoteFile(f"{url}/{weight}", int(one.size or 0), version)
        return _standing_in(url, folder, [*small, *weights], objects)


def weights_of(folder: Path) -> dict[str, RemoteFile]:
    """The weight files that something standing in for a snapshot has only headers of."""
    found = remote_folder(folder)
    if found is None or linked_folder(folder) is None:
        return {}
    return {
        file.relative_to(folder).as_posix(): one
        for file in sorted(folder.rglob("*.safetensors"))
        if (one := remote_file(file)) is not None
    }


def bring(folder: Path, names: Collection[str], progress: Callable[[str, int, int], None]) -> Path:
    """Download weight files of a stand-in; the snapshot, or what stands in for it with these."""
    known = weights_of(folder)
    address, links = remote_folder(folder), linked_folder(folder)
    assert address is not None and links is not None
    url = address[0]
    name, _, revision = url.removeprefix("hf://").partition("@")
    snapshot = links.parent / "snapshots" / revision
    if names:
        from huggingface_hub import hf_hub_download

        bar = _reporting_bar(progress, sum(known[each].size for each in names))
        at_once = ThreadPoolExecutor(DOWNLOADED_TOGETHER)
        with _reaching(on_hub(folder) or url) as api, at_once as threads:

            def one(weight: str) -> None:
                hf_hub_download(
                    name, weight, revision=revision, endpoint=api.endpoint, tqdm_class=bar
                )

            for _ in threads.map(one, sorted(names)):
                pass
    if not known.keys() - set(names):
        return snapshot
    there = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return _standing_in(url, snapshot, there, known)


def download(identifier: str) -> Path:
    """The whole snapshot of a model; what is not here is downloaded."""
    folder = stand_in(identifier)
    missing = weights_of(folder)
    if not missing:
        return folder
    with shown() as bar:
        return bring(folder, missing, bar)


def check_push(repository: str, private: bool) -> tuple[str, bool]:
    """The address of a model that may be uploaded, and whether it is there already.

    Why it may not is an error, before anything is made.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository):
        raise OutputError(f"--push {repository}: give the model's name on the hub as user/name.")
    _library(f"--push {repository}")
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise OutputError(f"--push {repository}: HF_HUB_OFFLINE is set; unset it to upload.")
    if not get_token():
        raise OutputError(f"--push {repository}: no token of the hub is known. Log in with "
                          "`hf auth login`, or set HF_TOKEN to one that may write.")  # fmt: skip
    with _reaching(repository, OutputError) as api:
        user = api.whoami()
        names = [user["name"], *(each["name"] for each in user.get("orgs", ()))]
        role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise OutputError(f"--push {repository}: the token may only read. Set HF_TOKEN to one "
                              "that may write.")  # fmt: skip
        if repository.partition("/")[0] not in names:
            raise OutputError(
                f"--push {repository}: the token is {names[0]}'s, who writes under "
                f"{' and '.join(names)}."
            )
        try:
            there = api.model_info(repository)
        except RepositoryNotFoundError:
            return f"{api.endpoint}/{repository}", False
        if private and not there.private:
            raise OutputError(
                f"--push {repository}: the model is there already and is public; --private makes "
                "new ones private. Choose another name, or change it on the hub first."
            )
        return f"{api.endpoint}/{repository}", True


def push(
    folder: Path, repository: str, private: bool, progress: Callable[[str, int, int], None]
) -> str:
    """Upload a finished folder in one commit; its address. What is there already is not sent again.

    Weights that an older commit has, and this folder has not, go.
    """
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    progress("uploading", 0, total)
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with _reaching(repository, OutputError) as api:
        api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        made = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a merge",
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
            ignore_patterns=[f"{hidden}/*" for hidden in _HIDDEN],
        )
    progress("uploading", total, total)
    return f"{api.endpoint}/{repository}/tree/{made.oid}"


def _named(identifier: str) -> tuple[str, str | None]:
    name, _, revision = identifier.partition("@")
    return name, revision or None


def _library(what: str) -> None:
    try:
        from huggingface_hub import HfApi, snapshot_download  # noqa: F401
    except ImportError:
        raise MissingExtra(f"The hub id {what}", ["huggingface_hub"], ["hub"]) from None


@contextmanager
def _reaching(identifier: str, error: type[SigmergeError] = RecipeError) -> Iterator[HfApi]:
    """The hub; what goes wrong with it is an `error` that says what to do."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi(library_name="sigmerge")
    name, revision = _named(identifier)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield api
    except SigmergeError:
        raise
    except GatedRepoError:
        told = (f"is gated. Accept its terms on {api.endpoint}/{name}, and {login} to a token of "
                "that account.")  # fmt: skip
    except RevisionNotFoundError:
        told = f"the hub has the model, and no branch, tag or commit {revision!r} of it."
    except RepositoryNotFoundError:
        told = (f"no such folder, and the hub has no such model ({api.endpoint}); or it is private "
                f"or gated: {login}.")  # fmt: skip
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as problem:
        told = _unreached(api, problem)
    except HfHubHTTPError as problem:
        code = problem.response.status_code if problem.response is not None else 0
        told = f"the hub refuses it ({_line(problem)})."
        if code in (401, 403):
            told = f"the hub refuses it ({_line(problem)}); {login} to a token that may do it."
        elif code == 429 or code >= 500:
            told = f"the hub does not answer now ({_line(problem)}). Run the same command again."
    except (OSError, ValueError) as problem:
        told = f"the hub could not provide it ({_line(problem)})."
    except Exception as problem:  # of the library that speaks HTTP, whichever it is
        if not any("HTTPError" in kind.__name__ or "TransportError" in kind.__name__
                   for kind in type(problem).__mro__):  # fmt: skip
            raise
        told = _unreached(api, problem)
    else:
        return
    raise error(f"{identifier!r}: {told}") from None


def _unreached(api: HfApi, problem: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return ("no such folder, and the hub's cache does not have it whole; HF_HUB_OFFLINE is "
                "set, so it is not downloaded.")  # fmt: skip
    return (f"no such folder, and the hub cannot be reached at {api.endpoint} ({_line(problem)}). "
            "Check the connection, and HF_ENDPOINT if it is set.")  # fmt: skip


def _line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0][:200].rstrip(".")


def _is_small(name: str, size: int) -> bool:
    """Whether a file comes with the headers: all of a model but weights, and what other programs
    have of it in folders."""
    inner = "/" in name and not name.startswith("additional_chat_templates/")
    return name.endswith(COPIED_WHOLE) and not inner and size <= LARGEST_COPY


def _literally(name: str) -> str:
    """A pattern that matches this name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _weights(folder: Path, names: Collection[str]) -> list[str]:
    """The weight files of a model that has these files; an index lies in its folder."""
    if INDEX in names:
        return sorted(set(weight_map(folder / INDEX).values()))
    for single in (SINGLE, ADAPTER_WEIGHTS):
        if single in names:
            return [single]
    return sorted(n for n in names if "/" not in n and n.endswith(".safetensors"))


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its configuration and all its weights; others may have taken a part
    of it."""
    names = [file.name for file in folder.iterdir()]
    if not {"config.json", ADAPTER_CONFIG} & set(names):
        return False
    weights = _weights(folder, names)
    if not weights:  # pickles, which were brought by another program
        return any(name.endswith(".bin") for name in names)
    shards = INDEX not in names and any(SHARD.search(Path(name).stem) for name in weights)
    return not shards and all((folder / name).is_file() for name in weights)


def _standing_in(
    url: str, snapshot: Path, names: Collection[str], objects: Mapping[str, RemoteFile]
) -> Path:
    """What stands in for a snapshot: links to the files of it that are here, stubs of others."""
    links = {
        name: Path(os.path.realpath(snapshot / name))
        for name in names
        if (snapshot / name).is_file()
    }
    stubs = {name: one for name, one in objects.items() if name not in links}
    blobs = snapshot.parents[1] / "blobs"
    if any(not file.is_relative_to(blobs) for file in links.values()):
        blobs = snapshot  # a cache without links
    return linked_stand_in(url, links, Path(os.path.realpath(blobs)), stubs)


def _silent_bar() -> Any:
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **how: Any) -> None:
            how.pop("name", None)
            super().__init__(*given, **{**how, "disable": True})

    return Silent


def _reporting_bar(progress: Callable[[str, int, int], None], total: int) -> Any:
    """The class of a bar that draws nothing, and reports the bytes of all downloads together."""
    lock, done = threading.Lock(), 0

    class Reporting(_silent_bar()):  # type: ignore[misc]
        def __init__(self, *given: Any, **how: Any) -> None:
            super().__init__(*given, **how)
            self.update(how.get("initial") or 0)  # what an interrupted download has

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            with lock:
                done += int(n or 0)
                progress("downloading", min(done, total), total)

    return Reporting
