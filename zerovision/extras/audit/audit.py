"""Audits a data set: reads every image once, looks for mistakes, and writes the findings into a folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import nn

from zerovision.delivery.evaluation_data import audit_options
from zerovision.delivery.settings import ImageSettings
from zerovision.delivery.trained_model import find_model
from zerovision.extras.audit.catalogue import Catalogue, embeddings, picture_features
from zerovision.extras.audit.copies import find_copies
from zerovision.extras.audit.findings import (
    DROP,
    GROUP,
    KINDS,
    Finding,
    Fix,
    copy_findings,
    copy_fixes,
    equal_files,
    label_findings,
    scene_groups,
)
from zerovision.extras.audit.labels import doubt_labels, outliers
from zerovision.extras.audit.output import FIXED, FIXES, PAGE, check_output, read_fixes, write_audit, write_fixed
from zerovision.extras.settings import AuditSettings
from zerovision.models import TIMM_PREFIX
from zerovision.models.build import build_model
from zerovision.models.timm_models import check_timm_name
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.files import errors_of_writing, replacing
from zerovision.training.base.run_folder import log_folder, shown_path, slug
from zerovision.training.base.settings import RunSettings
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data import load_data
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.settings import READ_LISTS
from zerovision.training.observe.sample_history import MOST_IMAGES, mean_probabilities
from zerovision.training.tasks.nearest import MOST_COMPARED, votes

SMALL_CLASS = 10  # training images
LEAST_ACCURACY = 0.8  # minimum accuracy of a classifier whose doubts are reported
QUERIES_AT_ONCE = 256


def run(settings: AuditSettings) -> int:
    """Run the command and return its exit code."""
    audit(settings)
    return 0


def audit(settings: AuditSettings) -> dict[str, Any]:
    """Audit a data set, write the files, print a summary, and return the facts in audit.json, or raise a UserError.

    With `--fixes`, only apply them, and return the number of images kept and of fixes.
    """
    data, run = settings.data, settings.run
    place = os.path.basename(os.path.abspath(os.path.expanduser(data)))
    folder = Path(os.path.expanduser(settings.output or log_folder() / "audits" / (slug(place) or "data")))
    # A folder that holds only an earlier result of --fixes may be replaced.
    if not (settings.fixes and (folder / FIXED).is_file() and len(os.listdir(folder)) == 1):
        check_output(folder)
    is_published = run.startswith(TIMM_PREFIX)
    model = find_model(run) if run and not is_published else None
    config = (model.config() if model else None) or TrainConfig()
    trained = load_model(model.weights) if model else None
    seen_as = trained[1]["preprocessing"] if trained else None
    images = ImageSettings(data=data, data_root=settings.data_root, max_megapixels=settings.max_megapixels)
    datasets = load_data(audit_options(config, images, seen_as))
    if is_published:
        trained = _published(run, datasets)
        seen_as = trained[1]["preprocessing"]
    wanted, values = seen_as and seen_as.values, datasets.preprocessing.values
    if trained and wanted != values:
        raise UserError(f"the model was trained on {wanted} values, but '{data}' has {values} values: convert them.")
    catalogue = Catalogue(datasets)
    if settings.fixes and not catalogue.are_files:
        raise UserError("--fixes: a table can only list files, but this data set is of arrays: change the arrays.")
    if settings.fixes:
        return _fix(folder, read_fixes(Path(os.path.expanduser(settings.fixes)), catalogue), catalogue)
    findings, found_fixes, notes = _examine(catalogue, trained, model.run if model else None)
    findings.sort(key=lambda one: ([*KINDS].index(one.kind), -one.confidence, one.image))
    counts = zip(datasets.class_names, datasets.train_counts, strict=True)
    facts = {
        "data": data,
        "run": run,
        "notes": [printable(note) for note in [*datasets.notes, *notes]],
        "small_classes": sorted((one for one in counts if one[1] < SMALL_CLASS), key=lambda one: one[1]),
    }
    write_audit(folder, facts, findings, found_fixes, catalogue)
    _show(folder, facts, findings, found_fixes, catalogue)
    return facts


def _published(name: str, data: DatasetPair) -> tuple[nn.Module, dict[str, Any]]:
    """Return a timm network with its published weights, and the network's preprocessing."""
    check_timm_name(name.removeprefix(TIMM_PREFIX))
    facts: Any = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    size = facts.input_size[-1]
    settings = RunSettings(model_type=name, pretrained=True, stem="keep")
    network = build_model(settings, len(data.class_names), size, data.preprocessing.channels).module.eval()
    cut = {"image_size": size, "resize_size": round(size / facts.crop_pct), "fit": ""}
    preprocessing = replace(data.preprocessing, **cut, interpolation=facts.interpolation)
    if data.preprocessing.channels == 3:
        preprocessing = replace(preprocessing, mean=tuple(facts.mean), std=tuple(facts.std))
    return network, {"preprocessing": preprocessing}


def neighbours_score(features: np.ndarray, labels: np.ndarray, is_trained: np.ndarray) -> float | None:
    """Return the share of non-training images that are in the majority class of their nearest training images.

    Return None if there are no training images or no other images. If there are many training images, only some of them
    are compared. `votes` defines the majority. The arguments are float32 [N, F], int64 [N] and bool [N].
    """
    vectors = torch.nn.functional.normalize(torch.from_numpy(features))
    own, others = np.flatnonzero(is_trained), np.flatnonzero(~is_trained)
    own = own[:: max(-(-len(own) // MOST_COMPARED), 1)]
    if not (len(own) and len(others)):
        return None
    known, classes = torch.from_numpy(labels[own]), int(labels.max()) + 1
    found = [votes(some, vectors[own], known, classes).argmax(1) for some in vectors[others].split(QUERIES_AT_ONCE)]
    return float((torch.cat(found).numpy() == labels[others]).mean())


def _examine(
    catalogue: Catalogue, trained: tuple[nn.Module, dict[str, Any]] | None, run: Path | None
) -> tuple[list[Finding], list[tuple[int, Fix]], list[str]]:
    """Return the findings, the fixes, and notes for the user."""
    pictures, colours, digests = catalogue.pictures()
    same = equal_files(digests)
    known = {copy[:2] for copy in same}
    copies = same + [copy for copy in find_copies(pictures) if copy[:2] not in known]
    findings = [Finding("unreadable", number, reason, 1.0) for number, reason in catalogue.unreadable.items()]
    findings += copy_findings(catalogue, copies)
    features = embeddings(*trained, catalogue) if trained else picture_features(pictures, colours)
    numbers = np.setdiff1d(np.arange(len(catalogue)), [*catalogue.unreadable])
    label_fixes: dict[int, Fix] = {}
    many = "images have several" if catalogue.has_several else f"there are more than {MOST_IMAGES} images"
    note = f"labels are not checked: {many}"
    if len(numbers) <= MOST_IMAGES:
        far, times = outliers(features[numbers])
        findings += [
            Finding("outlier", int(numbers[place]), "far from all others", float(1 - 0.5 / time))
            for place, time in zip(far, times, strict=True)
        ]
    if len(numbers) <= MOST_IMAGES and not catalogue.has_several:
        learned, own = np.full((len(catalogue), catalogue.num_classes), np.nan), catalogue.parts == "train"
        if run is not None:
            learned[own] = mean_probabilities(run, catalogue.labels[own], catalogue.num_classes)
        doubts = doubt_labels(features[numbers], catalogue.labels[numbers], catalogue.num_classes, learned[numbers])
        accuracy = doubts.accuracy if doubts else 0.0
        by = "the model's features" if trained else "the pixels"
        note = f"a classifier trained on {by} predicts {percent(accuracy)} of the labels (cross-validation)"
        if doubts and accuracy >= LEAST_ACCURACY:
            suspected, label_fixes = label_findings(catalogue, doubts, numbers)
            findings += suspected
        else:
            note += ", so labels are not checked" + ("" if trained else ": use --run to name a trained model")
    broken = [(number, Fix(DROP, "", 1.0, reason)) for number, reason in catalogue.unreadable.items()]
    proposed = [*label_fixes.items(), *copy_fixes(catalogue, copies, label_fixes), *broken]
    # An image can need a label and a part; of two fixes with the same action, the later one counts.
    last = {(number, fix.action): fix for number, fix in proposed}
    gone = {number for number, action in last if action == DROP}
    fixes = [(number, fix) for (number, action), fix in last.items() if action == DROP or number not in gone]
    fixes += scene_groups(catalogue, copies, gone)
    is_own = catalogue.parts[numbers] == "train"
    score = None if catalogue.has_several else neighbours_score(features[numbers], catalogue.labels[numbers], is_own)
    near = [] if score is None else [f"the nearest training images predict {percent(score)} of the other labels (k-NN)"]
    return findings, fixes, [note, *near]


def _fix(folder: Path, fixes: Sequence[tuple[int, Fix]], catalogue: Catalogue) -> dict[str, Any]:
    with errors_of_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FIXED) as new:
            kept = write_fixed(new, catalogue, fixes)
    print(f"{len(fixes)} fixes made, {kept} of {len(catalogue)} images kept: {shown_path(folder / FIXED)}")
    return {"images": kept, "fixes": len(fixes)}


def _show(
    folder: Path,
    facts: dict[str, Any],
    findings: Sequence[Finding],
    fixes: Sequence[tuple[int, Fix]],
    catalogue: Catalogue,
) -> None:
    for note in facts["notes"]:
        print(f"note: {note}")
    counts = Counter(one.kind for one in findings)
    print(f"{len(catalogue)} images of {catalogue.num_classes} classes")
    for kind, title in KINDS.items():
        if counts[kind]:
            example = next(one for one in findings if one.kind == kind)
            pair = [number for number in (example.image, example.other) if number >= 0]
            names = " = ".join(printable(catalogue.name(number)) for number in pair)
            print(f"{counts[kind]:6} {title[0].lower()}{title[1:]}, such as {names}")
    if few := facts["small_classes"]:
        print(f"{len(few):6} classes with fewer than {SMALL_CLASS} training images, such as {printable(few[0][0])}")
    actions = Counter(fix.action for _, fix in fixes)
    grouped = actions.pop(GROUP, 0)
    print("fixes  " + (", ".join(f"{count} {action}" for action, count in actions.items()) or "none"))
    if grouped and catalogue.are_files:
        made = f"--fixes {shown_path(folder / FIXES)}"
        print(f"groups {grouped} images share their scene with others: {made} gives each scene a group")
    print(f"page   {shown_path(folder / PAGE)}")
    task = f" {READ_LISTS}" if catalogue.has_several else ""
    if actions and catalogue.are_files:
        print(f"to train on the data with {FIXES}: --data {shown_path(folder / FIXED)}{task}")
