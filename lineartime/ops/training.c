/* What is between the matmuls of `ops.windows`, forward and backward, each a pass over memory. The
   file includes itself for bfloat16, float and double. Sums are float or double, and their order
   does not depend on the number of threads. */
#ifndef T
#include "numbers.h"
#include <math.h>

typedef char pointers_have_64_bits[sizeof(void *) == 8 ? 1 : -1]; /* Python passes them so, to decode.c too */

/* x is [rows, n, ...]: the numbers of a token lie side by side, at AT(x). */
#define EACH(x) *x, I x##_row, I x##_token
#define AT(x) ((x) + at / n * x##_row + at % n * x##_token)
#define PRAGMA(x) _Pragma(#x)
/* On all threads, if there are so many numbers that they are worth waking. */
#define PARALLEL(numbers) PRAGMA(omp parallel for if ((numbers) > 1 << 14))
#define TOKENS(size) PARALLEL(rows * n * (size)) for (I at = 0; at < rows * n; at++)
#define FOR(i, size) _Pragma("omp simd") for (I i = 0; i < (size); i++)
#define HIDDEN(i) (ids && (key[i] != id || id < 0))

/* A head times a number of each token. All is 64 bits wide. */
typedef struct {
  I head, x, x_row, x_token, factor, factor_row, factor_token;
} Part;

#define SOURCE "training.c"
#define IN_FLOAT64
#include "each_type.h"
#else

static inline R NAME(sigmoid)(R x) { return 1 / (1 + EXP(-x)); }
/* The derivative of silu(x) = x s. */
static inline R NAME(slope)(R x, R s) { return s * (1 + x * (1 - s)); }

/* out = silu(raw) attended, or silu(raw). */
void NAME(gate)(I rows, I n, I size, const T EACH(raw), const T EACH(attended), T EACH(out)) {
  TOKENS(size) {
    const T *x = AT(raw), *a = AT(attended); T *y = AT(out);
    if (attended) FOR(i, size) { R u = WIDE(x[i]); y[i] = NARROW(u * NAME(sigmoid)(u) * WIDE(a[i])); }
    else FOR(i, size) { R u = WIDE(x[i]); y[i] = NARROW(u * NAME(sigmoid)(u)); }
  }
}

/* The gradients of attended, if there is any, and of raw. */
void NAME(ungate)(I rows, I n, I size, const T EACH(raw), const T EACH(attended), const T EACH(dout),
                  T EACH(dattended), T EACH(draw)) {
  TOKENS(size) {
    const T *x = AT(raw), *a = AT(attended), *d = AT(dout);
    T *da = AT(dattended), *y = AT(draw);
    if (attended) FOR(i, size) {
      R u = WIDE(x[i]), s = NAME(sigmoid)(u), g = WIDE(d[i]);
      da[i] = NARROW(g * u * s);
      y[i] = NARROW(g * NAME(slope)(u, s) * WIDE(a[i]));
    } else FOR(i, size) { R u = WIDE(x[i]); y[i] = NARROW(WIDE(d[i]) * NAME(slope)(u, NAME(sigmoid)(u))); }
  }
}

static inline T *NAME(row)(const Part *part, I b, I t) { return (T *)part->x + b * part->x_row + t * part->x_token; }

static inline R NAME(factor)(const Part *part, I b, I t) {
  return ((const R *)part->factor)[b * part->factor_row + t * part->factor_token];
}

/* Each part's head, times its factor. Without z heads are those of `given`; else they are
   silu(z) gamma + beta, rotated. */
void NAME(heads)(I rows, I n, I S, I n_heads, const T EACH(z), const R *gamma, const R *beta, const R EACH(sin),
                 const R EACH(cos), const Part *given, I n_parts, const Part *parts) {
  TOKENS(S) {
    I b = at / n, t = at % n, H = S / 2;
    R h[S], a[S];
    if (z) FOR(i, S) { R x = WIDE(AT(z)[i]); a[i] = x * NAME(sigmoid)(x); }
    for (I k = 0; k < n_heads; k++) {
      const R *g = gamma + k * S, *o = beta + k * S, *s = AT(sin), *c = AT(cos);
      if (z) FOR(i, H) {
        R p = a[i] * g[i] + o[i], q = a[H + i] * g[H + i] + o[H + i];
        h[i] = p * c[i] - q * s[i];
        h[H + i] = q * c[i] + p * s[i];
      } else FOR(i, S) h[i] = WIDE(NAME(row)(given + k, b, t)[i]);
      for (const Part *part = parts; part < parts + n_parts; part++) if (part->head == k) {
        R w = NAME(factor)(part, b, t);
        T *y = NAME(row)(part, b, t);
        FOR(i, S) y[i] = NARROW(h[i] * w);
      }
    }
  }
}

/* The gradients of z, or of `given`. Those of gamma and beta are added to the sums of each block of
   `size` tokens, [2, n_heads, S]. */
void NAME(unheads)(I rows, I n, I S, I n_heads, const T EACH(z), const R *gamma, const R EACH(sin), const R EACH(cos),
                   const Part *given, I n_parts, const Part *parts, T EACH(dz), R *sums, I size) {
  PARALLEL(rows * n * S) for (I block = 0; block < (rows * n + size - 1) / size; block++)
  for (I at = block * size; at < (block + 1) * size && at < rows * n; at++) {
    I b = at / n, t = at % n, H = S / 2;
    R d[S], a[S], da[S], slopes[S];
    if (z) FOR(i, S) {
      R x = WIDE(AT(z)[i]), s = NAME(sigmoid)(x);
      a[i] = x * s, slopes[i] = NAME(slope)(x, s), da[i] = 0;
    }
    for (I k = 0; k < n_heads; k++) {
      FOR(i, S) d[i] = 0;
      for (const Part *part = parts; part < parts + n_parts; part++) if (part->head == k) {
        R w = NAME(factor)(part, b, t);
        const T *x = NAME(row)(part, b, t);
        FOR(i, S) d[i] += WIDE(x[i]) * w;
      }
      const R *g = gamma + k * S, *s = AT(sin), *c = AT(cos);
      R *dg = sums + (2 * block * n_heads + k) * S, *db = dg + n_heads * S;
      if (z) FOR(i, H) {
        R p = d[i] * c[i] + d[H + i] * s[i], q = d[H + i] * c[i] - d[i] * s[i];
        db[i] += p, dg[i] += p * a[i], da[i] += p * g[i];
        db[H + i] += q, dg[H + i] += q * a[H + i], da[H + i] += q * g[H + i];
      } else FOR(i, S) NAME(row)(given + k, b, t)[i] = NARROW(d[i]);
    }
    if (z) FOR(i, S) AT(dz)[i] = NARROW(da[i] * slopes[i]);
  }
}

/* a = relu(score + bias)^2 + own for n queries from `first` on and `size` keys of chunks of c tokens;
   0 between documents. `a` may be `score`. */
void NAME(weigh)(I rows, I n, I size, const T EACH(score), const T EACH(own), const R *bias, I C, const int32_t *ids,
                 I c, I first, T EACH(a)) {
  TOKENS(size) {
    const R *b = bias + (first + at % n) * C;
    const int32_t *key = ids ? ids + at / n * c : 0, id = ids ? key[first + at % n] : 0;
    const T *s = AT(score), *o = AT(own); T *y = AT(a);
    FOR(i, size) {
      R x = WIDE(s[i]) + b[i];
      x = (x < 0 ? 0 : x * x) + (own ? WIDE(o[i]) : 0);
      y[i] = NARROW(HIDDEN(i) ? 0 : x);
    }
  }
}

/* da becomes the gradient of scores, own that of own; to dbias is added the sum over rows. */
void NAME(unweigh)(I rows, I n, I size, const T EACH(score), T EACH(own), const R *bias, I C, const int32_t *ids, I c,
                   I first, T EACH(da), R *dbias) {
  PARALLEL(rows * n * size) for (I q = 0; q < n; q++) for (I at = q; at < rows * n; at += n) {
    const R *b = bias + (first + q) * C;
    const int32_t *key = ids ? ids + at / n * c : 0, id = ids ? key[first + q] : 0;
    const T *s = AT(score);
    T *y = AT(da), *o = AT(own);
    R *db = dbias + (first + q) * C;
    FOR(i, size) {
      R x = WIDE(s[i]) + b[i], d = HIDDEN(i) ? 0 : WIDE(y[i]);
      if (own) o[i] = NARROW(d);
      x = x < 0 ? 0 : 2 * x * d;
      db[i] += x;
      y[i] = NARROW(x);
    }
  }
}

/* The states, of `size` numbers, before each of n chunks, or backwards after it. The first is
   `state`, which becomes the one behind the last chunk: state = added + goes_on state. */
void NAME(walk)(I rows, I n, I size, const T EACH(added), R EACH(state), const R EACH(goes_on),
                T EACH(out), I backwards) {
  I piece = 4096, pieces = (size + piece - 1) / piece;
  PARALLEL(rows * n * size) for (I each = 0; each < rows * pieces; each++) for (I j = 0; j < n; j++) {
    I b = each / pieces, at = b * n + (backwards ? n - 1 - j : j), first = each % pieces * piece;
    const T *x = AT(added) + first;
    T *y = AT(out) + first;
    R *s = state + b * state_row + first, w = goes_on ? *AT(goes_on) : 1;
    FOR(i, size - first < piece ? size - first : piece) {
      R old = s[i];
      y[i] = NARROW(old);
      s[i] = WIDE(x[i]) + w * old;
    }
  }
}

#endif
