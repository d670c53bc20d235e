"""Predicts the classes of images with a trained model.

python scripts/predict.py digits photo.png other.jpg
python scripts/predict.py logs/runs/digits ~/photos --output labels.csv
find ~/photos -newer last | python scripts/predict.py digits - --format json
python scripts/predict.py digits photo.png --explain why          # why/00001-photo.png: what spoke for the label
curl -s https://example.org/cat.jpg | python scripts/predict.py digits -

Exit code: 0 all images were labelled, 1 some could not be read (named on standard error), 2 the arguments are wrong.
Only safetensors are read.
"""

from __future__ import annotations

import argparse
import sys

from zerovision.delivery.flags import predict_parser
from zerovision.training.config.command_line import run_script


def predict(given: argparse.Namespace) -> int:
    """Predict the images that the command line names; the predictions go to standard output or a file."""
    from zerovision.delivery.trained_model import find_model

    find_model(given.model)  # before the slow imports
    import zerovision.delivery.predict
    from zerovision.delivery.prediction_output import saving_pictures, write_predictions

    arguments = vars(given)
    kind, output, folder = (arguments.pop(name) for name in ("format", "output", "explain"))
    predictions = zerovision.delivery.predict.predict(**arguments, explain=bool(folder))
    if folder:
        predictions = saving_pictures(predictions, folder)
    return 1 if write_predictions(predictions, kind, output, given.top_k) else 0


parse = predict_parser(__doc__).parse


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("predict", parse, predict, writes_product=True)


if __name__ == "__main__":
    sys.exit(main())
