/* What is between the matmuls of FLASH's attention on a processor, forward and backward: each step
   reads and writes memory once. The file includes itself for float and for bfloat16. */
#ifndef T
#include "numbers.h"

static inline float sigmoid(float x) { return 1 / (1 + exp_(-x)); }

#define T float
#define WIDE(x) (x)
#define NARROW(x) (x)
#define NAME(name) name##_float32
#include "training.c"
#undef T
#undef WIDE
#undef NARROW
#undef NAME
#define T uint16_t
#define WIDE(x) wide_bf16(x)
#define NARROW(x) narrow_bf16(x)
#define NAME(name) name##_bfloat16
#include "training.c"

#else

/* silu(x). */
void NAME(silu)(const T *x, I n, T *restrict out) {
  for (I i = 0; i < n; i++) {
    float a = WIDE(x[i]);
    out[i] = NARROW(a * sigmoid(a));
  }
}

#endif
