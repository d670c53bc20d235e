"""The `zerovision` command: runs the subcommand that is named on the command line.

Importing this module loads only the standard library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zerovision import __version__

VERBS = {  # what each subcommand does
    "train": "train on a folder of photographs; chooses the settings and prints them",
    "launch": "train on this machine or several: MODEL STRATEGY [MACHINES] GPUS BATCH_SIZE EPOCHS",
    "evaluate": "compute the scores of a trained model, class by class",
    "predict": "label images",
    "serve": "label images that are dropped on a page",
    "export": "write a model for ONNX Runtime, torch.export or safetensors",
    "publish": "upload a model to the Hugging Face hub",
    "report": "write the page of a run, or of several side by side",
    "audit": "find wrong labels and copies in a data set",
    "pack": "write a data set as tar files",
    "plan": "choose a strategy that fits into memory",
    "doctor": "examine this machine, several machines, or a data set",
    "sweep": "train with several values of flags and compare",
    "replay": "repeat one step of a run, bit for bit",
    "bisect": "find the first step at which two runs differ",
}
WORDS_OF_ONE_MACHINE = 5  # number of positional arguments of `launch` for a single machine


def main() -> int:
    """Run the subcommand that the command line names; return its exit code."""
    verb, *words = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help", "help"):
        listing = "\n".join(f"  {name:9} {what}" for name, what in VERBS.items())
        _print(f"Train image classifiers and use them.\n\n{listing}\n\nzerovision COMMAND --help lists its flags.\n")
        return 0
    if verb in ("-V", "--version"):
        print(f"zerovision {__version__}")
        return 0
    if verb not in VERBS:
        from difflib import get_close_matches

        near = "".join(f" Did you mean {name}?" for name in get_close_matches(verb, VERBS, 1))
        print(f"zerovision: unknown command '{verb}': expected one of {', '.join(VERBS)}.{near}", file=sys.stderr)
        return 2
    from zerovision.training.base.run_folder import SCRIPTS, TYPED

    os.environ[TYPED] = verb  # so that messages name the command, not a script
    if verb == "launch":
        return _launch(words)
    from zerovision.commands import main as run_command

    sys.argv = [f"zerovision {verb}", *words]
    return run_command(SCRIPTS.get(verb, verb), verb)


def _print(text: str) -> None:
    """Print to standard output, whose reader may stop early, as `head` does."""
    from zerovision.training.base.lasting_output import report_failed_output

    report_failed_output(is_product=False)
    print(text, end="")


def _launch(words: list[str]) -> int:
    """Run the single-machine or the multi-machine launcher."""
    leading = next((count for count, word in enumerate(words) if word.startswith("-")), len(words))
    script = "launch_multi_node" if leading > WORDS_OF_ONE_MACHINE else "launch_distributed"
    if not words or ({"-h", "--help"} & {*words} and words[-2:] != ["--help", "all"]):
        from zerovision.training.base.run_folder import as_typed

        _print(as_typed((Path(__file__).parent / "launch" / "usage" / f"{script}.txt").read_text()))
        return 0
    from zerovision.launch.arguments import run_launcher
    from zerovision.launch.launch import main as launch

    sys.argv = [sys.argv[0], f"{script}.sh", *words]
    run_launcher(launch)


if __name__ == "__main__":
    sys.exit(main())
