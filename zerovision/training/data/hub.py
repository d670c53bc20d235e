"""`hf:ORG/NAME[:SPLIT]`: Parquet files of a data set of Hugging Face's hub, in its cache, see `$HF_HOME`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.data import DataOptions, archives, parquet
from zerovision.training.data.division import in_parts
from zerovision.training.data.images import Images
from zerovision.training.data.parts import PARTS, TRAIN
from zerovision.training.data.reading.remote import redacted


def listing(options: DataOptions) -> Images:
    """Return the images of a data set of the hub, or of one split as if there were no others.

    Raises:
        UserError: It is not in the cache and `download` is not set, or there is no such split.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, split = options.data.partition(":")[2].partition(":")
    organization, _, rest = name.partition("/")
    repository, _, inner = rest.partition("/")
    repository = f"{organization}/{repository}"
    try:
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", allow_patterns="*.parquet", local_files_only=not options.download
            )
        )
    except Exception as error:  # of names, of networks, of rights
        if options.download:
            raise UserError(f"hf:{repository} could not be downloaded: {redacted(one_line(error))}.") from None
        raise UserError(
            f"hf:{repository} is not in {constants.HF_HUB_CACHE}: add --download, or give ORG/NAME as on the hub."
        ) from None
    files = [file.relative_to(folder) for file in folder.rglob("*.parquet")]
    configurations = sorted({str(file.parent) for file in files})
    if inner or len(configurations) == 1:
        folder /= inner or configurations[0]
    elif len({file.name for file in files}) < len(files):
        raise UserError(f"hf:{repository} has {', '.join(configurations)}: give hf:{repository}/{configurations[0]}.")
    found = archives.read(parquet.kind_of(options), replace(options, data=str(folder)))
    if not split:
        return in_parts(found, options)
    parts = sorted(found.words["part"])
    if split not in parts:
        raise UserError(f"hf:{repository} has no split {one_line(split)}; it has {', '.join(filter(None, parts))}.")
    chosen = found.take(np.flatnonzero(found["part"] == found.words["part"].index(split)))
    return chosen.renamed("part", dict.fromkeys(parts, TRAIN), PARTS)
