// What the parts of the pretended CUDA share.
#pragma once
#include <cstddef>
#include <cstdlib>

#define API extern "C" __attribute__((visibility("default")))

// PRETENDED_GPUS: how many GPUs there are.
int device_count();

// One more kernel would have run.
void count_launch();
