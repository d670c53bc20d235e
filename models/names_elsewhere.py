"""What timm, torchvision, Lightning, the Hugging Face Trainer, Ultralytics and DeepSpeed call flags and values.

By the answer, the words that get it. An answer begins with our name, which must be one that the script or the field
takes; one that ends with a full stop is said as it is, and is a word's last. Words are compared as `plain` writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

_GPUS = (
    "The number of GPUs is the launcher's: bash scripts/launch_distributed.sh <model> <strategy> <num_gpus> "
    "<batch_size> <epochs>, or torchrun --nproc_per_node."
)
_CURVES = "Not there yet: --loggers takes tensorboard, wandb, mlflow, trackio."

FLAGS = {
    "--config": "cfg c config-file",
    "--check-config": "dry-run fast-dev-run",
    "--model-type timm:NAME": "model m arch a architecture backbone network net model-name model-name-or-path",
    "--strategy fsdp_stage3": "fsdp fsdp-config sharding-strategy",
    "--strategy (ddp is stage 1, fsdp_stage2 is 2, fsdp_stage3 is 3)": "zero zero-stage stage",
    "--epochs": "max-epochs num-epochs num-train-epochs n-epochs nb-epochs nepochs epoch",
    "--batch-size": "b bs batch train-batch-size per-device-train-batch-size train-micro-batch-size-per-gpu",
    "--batch-size auto": "auto-scale-batch-size auto-find-batch-size",
    "--gradient-accumulation-steps": "grad-accum-steps accumulate-grad-batches grad-accum accum-iter accum accumulate",
    "--learning-rate": "lr lr0",
    "--learning-rate auto": "lr-find auto-lr-find auto-lr",
    "--learning-rate with --base-batch-size 256": "lr-base blr base-lr",
    "--base-batch-size": "lr-base-size",
    "--weights": "pretrained-path initial-checkpoint checkpoint ckpt load finetune weights-path",
    "--tune head": "freeze freeze-backbone linear-probe feature-extract",
    "--tune lora:R": "lora lora-r use-lora use-peft",
    "--dropout": "drop",
    "--activation-checkpointing": "grad-checkpointing gradient-checkpointing",
    "--sync-batchnorm": "sync-bn syncbn",
    "--optimizer": "opt optim optimiser",
    "--optimizer-options": "opt-kwargs opt-betas betas optim-args",
    "--optimizer-options eps=VALUE": "opt-eps adam-epsilon epsilon eps",
    "--weight-decay": "wd",
    "--layer-decay": "llrd layer-lr-decay layerwise-lr-decay",
    "--gradient-clipping": "clip-grad clip-grad-norm gradient-clip-val max-grad-norm grad-clip clip",
    "--loss bce": "bce-loss bce",
    "--task multilabel": "multilabel multi-label",
    "--distill kl:T with --teacher": "distillation kd kd-loss distillation-type distillation-tau",
    "--teacher": "teacher-model kd-model kd-model-name teacher-path",
    "--label-smoothing": "smoothing label-smoothing-factor",
    "--bce-target-threshold": "bce-target-thresh",
    "--ema 0.9999": "model-ema use-ema swa stochastic-weight-avg",
    "--ema": "model-ema-decay ema-decay ema-momentum",
    "--warmup-epochs": "lr-warmup-epochs warmup warmup-ratio warmup-steps num-warmup-steps",
    "--schedule": "sched scheduler lr-scheduler lr-scheduler-type lr-schedule lr-policy",
    "--schedule cosine": "cos-lr cosine",
    "--final-learning-rate-scale (a share of the rate)": "min-lr lrf lr-min eta-min",
    "--schedule step:30,60:0.1": "decay-milestones lr-milestones milestones lr-steps",
    "--schedule step:30:0.1": "decay-epochs lr-step-size step-size dr decay-rate lr-gamma gamma",
    "--best-by": "metric-for-best-model eval-metric best-metric",
    "--early-stopping-patience": "patience early-stopping early-stop",
    "--seed": "random-seed manual-seed seed-everything",
    "--precision": "amp-dtype model-dtype dtype torch-dtype compute-dtype mixed-precision",
    "--precision bf16": "amp bf16 bfloat16 use-amp",
    "--precision fp16": "fp16 half use-fp16",
    "--offload": "cpu-offload zero-offload offload-optimizer",
    "--compile on": "torchcompile torch-compile",
    "--threads-per-rank": "num-threads threads",
    "--data": "data-dir data-path dataset dataset-name dataset-dir dataset-path train-dir train-data image-folder root",
    "--download": "dataset-download",
    "--folds": "kfold k-fold kfolds k-folds cv n-splits",
    "--val-fraction": "val-split validation-split val-size test-size val-ratio split-ratio",
    "--val-part": "val-dir valdir val-data val-folder",
    "--image-size": "img-size imgsz input-size img resolution image-res train-crop-size",
    "--eval-image-size": "val-crop-size val-resize-size eval-size",
    "--eval-crop": "crop-pct",
    "--interpolation": "train-interpolation",
    "--image-channels": "in-chans in-channels input-channels",
    "--augmentation none": "no-aug",
    "--augmentation": "auto-augment aug augment augmentations data-augmentation",
    "--augmentation randaugment --randaugment": "aa",
    "--crop-scale": "scale",
    "--crop-ratio": "ratio",
    "--mirror": "hflip fliplr hflip-prob",
    "--color-jitter": "hsv-h hsv-s hsv-v jitter",
    "--random-erasing": "reprob random-erase erasing",
    "--random-erasing-mode": "remode",
    "--mixup": "mixup-alpha",
    "--cutmix": "cutmix-alpha",
    "--mixup-probability": "mixup-prob",
    "--mixup-switch-probability": "mixup-switch-prob",
    "--mixup-off-epochs (the last ones)": "mixup-off-epoch close-mosaic",
    "--sampling balanced": "weighted-sampler balanced-sampler class-balanced use-weighted-sampler",
    "--class-weights": "class-weight cls-weights weighted-loss",
    "--order shards --shuffle-window": "shuffle-buffer shuffle-buffer-size shuffle-block-size shuffle-size",
    "--repeated-augmentation": "aug-repeats ra-reps ra-sampler",
    "--workers": "j num-workers dataloader-num-workers nw n-workers",
    "--run-name": "experiment exp-name experiment-name name",
    "--log-dir": "output-dir output out project save-dir default-root-dir logging-dir checkpoint-dir logdir",
    "--log-every-steps": "log-interval logging-steps print-freq log-every-n-steps log-freq",
    "--progress": "verbose quiet disable-tqdm enable-progress-bar v q",
    "--loggers": "report-to logger tracker trackers tb wandb log-wandb use-wandb mlflow trackio",
    "--tensorboard false": "no-tensorboard",
    "--profile": "profiler",
    "--resume": "resume-from-checkpoint resume-from ckpt-path resume-path auto-resume load-checkpoint",
    "--save-every-steps": "recovery-interval save-steps save-freq save-interval checkpointing-steps",
    "--keep-last": "checkpoint-hist save-total-limit save-top-k max-checkpoints",
    "--global-batch": "global-batch-size total-batch-size effective-batch-size",
    # Of the other scripts.
    "RUN_OR_WEIGHTS, the first word": "model weights checkpoint ckpt ckpt-path run run-name model-path m",
    "IMAGE, after RUN_OR_WEIGHTS": "source input image images img data data-dir path",
    "RUN, the first word": "run run-name log-dir",
    "--top-k": "topk num-preds k",
    "--flip": "tta test-time-augmentation hflip",
    "--precision int8": "int8 quantize quant",
    "--split": "set subset part",
    "--num-gpus": "gpus ngpus devices nproc-per-node num-processes world-size",
    "--output": "out o output-dir output-file results-file save-dir results-dir project",
    # In words.
    _GPUS: "gpus gpu num-gpus ngpus n-gpu n-gpus devices nproc-per-node num-processes world-size dp tp",
    "Several machines are scripts/launch_multi_node.sh's: --help.": "nnodes num-nodes nodes hostfile hosts",
    "That is a launcher's: bash scripts/launch_distributed.sh --help.": "master-port max-restarts preflight",
    "GPUs are used if there are any; CUDA_VISIBLE_DEVICES chooses some.": "device accelerator no-cuda use-cpu cpu",
    "The launcher says where ranks meet: leave it out.": (
        "dist-url dist-backend multiprocessing-distributed master-addr rank node-rank local-rank distributed"
    ),
    "The classes follow from the data: leave it out.": "num-classes nb-classes nc n-classes classes",
    "That is always so: leave it out.": "channels-last pin-mem pin-memory persistent-workers cudnn-benchmark benchmark",
    "A run counts in epochs: --epochs.": "max-steps steps iterations max-iters num-steps train-iters",
    "For a trained model: scripts/evaluate.py RUN.": "eval evaluate validate test test-only do-eval do-train eval-only",
    _CURVES: "comet neptune clearml",
    "WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME in the environment names it.": "wandb-project",
    "Not there yet.": (
        "focal focal-loss limit-train-batches mosaic"
        " limit-val-batches overfit-batches bn-momentum grayscale vflip flipud degrees rotation perspective mean std"
    ),
}
_PLATEAU = "Not there yet: take cosine, or wsd for a run of open length."
_OTHER_FORMAT = "Not there yet: write onnx, which most converters read."

# By what is named.
VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "ddp": "dp zero1 zero-1 stage1 deepspeed deepspeed-stage-1 ddp-spawn ddp-notebook no-shard none single"
        " ddp-find-unused-parameters-true ddp-find-unused-parameters-false data-parallel distributed",
        "fsdp_stage2": "zero2 zero-2 stage2 deepspeed-stage-2 deepspeed-stage-2-offload shard-grad-op",
        "fsdp_stage3": "zero zero3 zero-3 stage3 deepspeed-stage-3 deepspeed-stage-3-offload full-shard fsdp2",
    },
    "model": {
        "mobilenet": "mobilenet-v3-small",
        "timm:mobilenetv3_large_100": "mobilenet-v3-large",
        "timm:mobilenetv2_100": "mobilenet-v2",
        "timm:tf_efficientnetv2_s": "efficientnet-v2-s",
        "timm:wide_resnet50_2": "wideresnet50",
        "timm:vit_base_patch16_224": "vit-b-16 vit",
        "timm:vit_base_patch32_224": "vit-b-32",
        "timm:vit_large_patch16_224": "vit-l-16",
        **{f"timm:swin_{size}_patch4_window7_224": f"swin-{size[0]}" for size in ("tiny", "small", "base")},
    },
    "precision": {
        "bf16": "bfloat16 bf16-mixed bf16-true amp mixed",
        "fp16": "float16 half 16 16-mixed fp16-mixed 16-true",
        "fp32": "float32 float full 32 32-true no none single tf32",
        "int8": "quint8 uint8 i8 ptq",
        "Not there yet: bf16 stores 16 bits too.": "fp16 float16 half 16",
    },
    "best_by": {
        "top1": "accuracy acc acc1 val-acc eval-accuracy",
        "loss": "val-loss eval-loss",
        "macro_f1": "f1 f1-macro eval-f1",
        "auroc": "auc roc-auc",
        "map": "ap average-precision",
    },
    "offload": {"optimizer": "cpu optim true", "all": "param params parameters full"},
    "engine": {"torch": "pytorch fsdp fsdp2 ddp", "deepspeed": "ds zero"},
    "compile": {"on": "inductor default reduce-overhead max-autotune"},
    "loss": {
        "cross_entropy": "ce crossentropy crossentropyloss softmax nll categorical-crossentropy",
        "bce": "bcewithlogits bcewithlogitsloss bce-with-logits binary-crossentropy sigmoid",
        "Not there yet: for rare classes there are --class-weights and --sampling balanced.": "focal focalloss asl",
    },
    "optimizer": {
        "adamw": "adamw-torch adamw-torch-fused adamw-hf auto",
        "sgd": "momentum-sgd",
    },
    "schedule": {
        "cosine": "cos cosineannealing cosineannealinglr cosine-annealing cosine-with-warmup cosine-lr",
        "linear": "linearlr linear-with-warmup",
        "polynomial": "poly polynomiallr polynomial-decay",
        "step": "steplr multistep multisteplr",
        "constant": "constantlr constant-with-warmup none",
        "wsd": "warmup-stable-decay trapezoidal trapezoid",
        _PLATEAU: "plateau reducelronplateau reduce-lr-on-plateau onecycle onecyclelr one-cycle exponential"
        " exponentiallr cosine-with-restarts inverse-sqrt tanh cosineannealingwarmrestarts cyclic",
    },
    "augmentation": {
        "randaugment": "ra rand-augment randaug rand",
        "trivialaugment": "ta ta-wide trivialaugmentwide trivial",
        "autoaugment": "aa original imagenet v0",
        "autoaugment_cifar10": "cifar10",
        "3augment": "threeaugment three-augment deit3 3a",
        "crop_flip": "default standard basic",
        "Not there yet: randaugment and trivialaugment are the nearest.": "augmix autoaugment-augmix",
    },
    "data set": {
        "torchvision:CIFAR10": "cifar10 cifar torch/cifar10",
        "torchvision:CIFAR100": "cifar100 torch/cifar100",
        "torchvision:MNIST": "mnist torch/mnist",
        "torchvision:FashionMNIST": "fashionmnist fashion-mnist fmnist",
        "torchvision:SVHN": "svhn",
        "torchvision:STL10": "stl10",
        "torchvision:Food101": "food101 food-101",
        "torchvision:Flowers102": "flowers102 flowers oxford-flowers",
        "torchvision:OxfordIIITPet": "pets oxfordiiitpet oxford-pets oxford-iiit-pet",
        "Give the folder that holds its train/ and val/: DIR.": "imagenet imagenet1k imagenet-1k imagefolder",
    },
    "format": {
        "safetensors": "pt pth pytorch torch bin",
        "torch-export": "pt2 exported-program exportedprogram executorch",
        _OTHER_FORMAT: "torchscript jit engine tensorrt trt openvino coreml tflite litert saved-model savedmodel ncnn",
    },
}


def plain(word: str) -> str:
    """Return a name as it is compared: lower case, '-' for '_', without dashes and Lightning's section before it."""
    return word.lower().replace("_", "-").lstrip("-").rpartition(".")[2]


@cache
def _answers(kind: str) -> Mapping[str, list[str]]:
    """Return the answers to each word: of a kind of value, or of flags for ''."""
    found: dict[str, list[str]] = {}
    for answer, words in (VALUES.get(kind, {}) if kind else FLAGS).items():
        for word in words.split():
            found.setdefault(word, []).append(answer)
    return found


def ours(word: str, here: Collection[str], kind: str = "") -> str:
    """Return a sentence with what a word of others is called here, '' if it is in no table.

    Args:
        word: as given.
        here: the names that there are; an answer with another name is left out.
        kind: of value that the word names, a key of `VALUES`; '' for a flag.
    """
    for answer in _answers(kind).get(plain(word), ()):
        if answer.endswith("."):
            return f" {answer}"
        name = answer.split()[0].rstrip(",")
        family, colon, _ = name.partition(":")
        if name in here or (colon and any(one.startswith(family + colon) for one in here)):
            return f" Here that is {answer}."
    return ""
