/* What every kernel in C needs: bfloat16, and exp and sigmoid as code that a compiler turns into
   vectors. */
#include <stdint.h>
#include <string.h>

typedef int64_t I;

static inline float wide_bf16(uint16_t bits) {
  uint32_t all = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &all, 4);
  return x;
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow_bf16(float x) {
  uint32_t all;
  memcpy(&all, &x, 4);
  return x != x ? 0x7fc0 : (all + 0x7fff + (all >> 16 & 1)) >> 16;
}

/* e^x by Cephes' polynomial, 2e-7 of it at most away; infinite above 88.3, and 0 below -87.6. */
static inline float exp_(float x) {
  x = x > 89 ? 89 : x;
  x = x < -88 ? -88 : x;
  /* As calls, because a compiler that may reorder sums would lose the second of the two parts of ln 2. */
  float n = __builtin_rintf(x * 1.44269504f);
  float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return (p * r * r + r + 1) * power;
}
