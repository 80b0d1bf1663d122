/* One token a row through all layers of FLASH and FLASH+, for rows whose past is a state of constant
   size. D: width of the stream. E: of u and v. S: of z and of each head. C: tokens of a chunk. K: of
   `key_conv`. T: type of weights, keys and values; sums are float. The file includes itself for float
   and for bfloat16, and allocates nothing. */
#ifndef T
#include <math.h>
#include "numbers.h"

typedef struct {
  I layers, d, e, s, c, k, own_grid, mean, linear_rope, local_key_conv;
  double eps, last_eps;
  const void *position_scale, *norm_D, *norm_bias_D;  /* of ScaledSin, else 0; of the last norm */
  const double *position_frequency, *rope_frequency;  /* an angle is a position times a frequency */
} Model;

/* A layer's weights, and its state of all rows. A pointer is 0 where a model has no such part. */
typedef struct {
  const void *norm_D, *norm_bias_D, *in_FD, *in_bias_F, *gamma_4S, *beta_4S, *out_DE, *out_bias_D;
  const void *taps_KS, *gate_S, *gate_bias;
  void *k_quad_BCS, *k_lin_BCS, *v_BCE, *z_BKS;
  float *kv_BSE, *gate_BC, *written_B, *bias_C;
} Layer;

static void rotary(I position, const double *f, I half, float *sin_cos) {
  for (I i = 0; i < half; i++) sin_cos[i] = sin(position * f[i]), sin_cos[half + i] = cos(position * f[i]);
}

#define SOURCE "decode.c"
#include "each_type.h"
#else
static void NAME(store)(const float *from, I n, T *to) {
  for (I i = 0; i < n; i++) to[i] = NARROW(from[i]);
}

/* y += W x + b for rows of x and y, W [n, k]. A row of W, read once, meets four rows of x at a time. */
void NAME(linear)(const T *w, const T *b, const float *x, I rows, I n, I k, float *y) {
  for (I i = 0; i < n; i++, w += k)
    for (I r = 0; r < rows; r += 4) {
      const I left = rows - r;
      const float *x0 = x + r * k, *x1 = x0 + (left > 1) * k, *x2 = x1 + (left > 2) * k, *x3 = x2 + (left > 3) * k;
      float s0 = 0, s1 = 0, s2 = 0, s3 = 0;  /* an array of four would be kept in memory */
      if (left == 1)
        for (I j = 0; j < k; j++) s0 += WIDE(w[j]) * x0[j];
      else
        for (I j = 0; j < k; j++) {
          const float a = WIDE(w[j]);
          s0 += a * x0[j], s1 += a * x1[j], s2 += a * x2[j], s3 += a * x3[j];
        }
      const float sum[4] = {s0, s1, s2, s3};
      for (I q = 0; q < 4 && q < left; q++) y[(r + q) * n + i] += sum[q] + (b ? WIDE(b[i]) : 0);
    }
}

/* y += the sum over j < n of weight[j] times row j of a matrix [n, e]. Rows of weight 0, as relu^2
   has many, are not read. */
static void NAME(add_rows)(const T *rows, const float *weight, I n, I e, float *restrict y) {
  for (I j = 0; j < n; j++, rows += e)
    for (I i = 0; weight[j] != 0 && i < e; i++) y[i] += weight[j] * WIDE(rows[i]);
}

/* LayerNorm; or without a bias ScaleNorm, which has one weight and subtracts no mean. y may be x. */
static void NAME(norm)(const T *w, const T *b, double eps, const float *x, I d, float *y) {
  float mean = 0, square = 0;
  for (I i = 0; b && i < d; i++) mean += x[i] / d;
  for (I i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean) / d;
  const float scale = 1 / sqrtf(square + (float)eps);
  for (I i = 0; i < d; i++) y[i] = (x[i] - mean) * scale * WIDE(w[b ? i : 0]) + (b ? WIDE(b[i]) : 0);
}

/* Adds a full chunk's tokens from slot `first` on to the sum over the document's chunks. */
static void NAME(close)(const Model *m, const Layer *l, I b, I first, int is_new) {
  const I c = m->c, s = m->s, e = m->e;
  const T *k_CS = (T *)l->k_lin_BCS + b * c * s, *v_CE = (T *)l->v_BCE + b * c * e;
  float *kv_SE = l->kv_BSE + b * s * e, weight[8];
  if (is_new) memset(kv_SE, 0, s * e * sizeof(float));
  for (I j = first; j < c; j += 8)
    for (I i = 0, n = c - j < 8 ? c - j : 8; i < s; i++) {
      for (I q = 0; q < n; q++) weight[q] = WIDE(k_CS[(j + q) * s + i]);
      NAME(add_rows)(v_CE + j * e, weight, n, e, kv_SE + i * e);
    }
  if (l->written_B && is_new) l->written_B[b] = 0;
  for (I j = first; l->written_B && j < c; j++) l->written_B[b] += l->gate_BC[b * c + j];
}

/* u * A v of row b's token, out [E], which is 0; its document has `age` tokens before it, and its grid p. uvz:
   after silu. It writes to the state. work: 5 S + C floats. */
static void NAME(attend)(const Model *m, const Layer *l, I b, I p, I age, const float *sin_cos, const float *uvz,
                         float *work, float *out) {
  const I c = m->c, s = m->s, e = m->e, o = p % c, first = age < o ? o - age : 0, closed = age - o;
  T *k_CS = (T *)l->k_quad_BCS + b * c * s, *v_CE = (T *)l->v_BCE + b * c * e, *z_KS = (T *)l->z_BKS + b * m->k * s;
  const float *z = uvz + 2 * e, *conv = m->k ? work + 4 * s : z;
  float *head = work, *weight = work + 5 * s, gate = l->gate_S ? WIDE(*(T *)l->gate_bias) : 0;
  memset(work, 0, (5 * s + c) * sizeof(float));
  if (m->k) NAME(store)(z, s, z_KS + p % m->k * s);
  for (I n = 0; n < m->k && n <= age; n++)  /* the convolution of the document's last tokens */
    for (I i = 0; i < s; i++)
      work[4 * s + i] += WIDE(((T *)l->taps_KS)[(m->k - 1 - n) * s + i]) * WIDE(z_KS[(p - n) % m->k * s + i]);
  for (I i = 0; l->gate_S && i < s; i++) gate += conv[i] * WIDE(((T *)l->gate_S)[i]);
  gate = l->gate_S ? 1 / (1 + exp_(-gate)) : 1;
  if (l->gate_BC) l->gate_BC[b * c + o] = gate;
  /* The linear half reads the sum over closed chunks, divided by its tokens or by their gates. */
  const float written = l->written_B ? l->written_B[b] : 1, count = m->mean ? closed : written < 1 ? 1 : written;
  const float scale[4] = {1, 1, closed > 0 ? 1 / count : 0, gate};
  for (I n = 0; n < 4; n++) {  /* query and key of the local half, then of the linear half */
    const float *from = n == 3 || (n == 1 && m->local_key_conv) ? conv : z;
    const T *gamma = (T *)l->gamma_4S + n * s, *beta = (T *)l->beta_4S + n * s;
    for (I i = 0; i < s; i++) head[n * s + i] = (from[i] * WIDE(gamma[i]) + WIDE(beta[i])) * scale[n];
    for (I i = 0; i < s / 2 && (n < 2 || m->linear_rope); i++) {
      const float x = head[n * s + i], y = head[n * s + s / 2 + i], sine = sin_cos[i], cosine = sin_cos[s / 2 + i];
      head[n * s + i] = x * cosine - y * sine, head[n * s + s / 2 + i] = y * cosine + x * sine;
    }
  }
  NAME(store)(head + s, s, k_CS + o * s);
  NAME(store)(head + 3 * s, s, (T *)l->k_lin_BCS + (b * c + o) * s);
  NAME(store)(uvz + e, e, v_CE + o * e);
  NAME(linear)(k_CS + first * s, 0, head, 1, o + 1 - first, s, weight + first);
  for (I j = first; j <= o; j++) {
    const float score = weight[j] / c + (l->bias_C ? l->bias_C[c - 1 - o + j] : 0);
    weight[j] = score < 0 ? 0 : score * score;  /* NaN stays NaN */
  }
  NAME(add_rows)(v_CE + first * e, weight + first, o + 1 - first, e, out);
  if (closed > 0) add_rows_float32(l->kv_BSE + b * s * e, head + 2 * s, s, e, out);
  for (I i = 0; i < e; i++) out[i] *= uvz[i];
  if (o == c - 1) NAME(close)(m, l, b, first, closed <= 0);
}

/* The next tokens of n rows of the state, which share a pass over the weights, and which are n of
   `all` rows in x [tokens, all, D]: embeddings, then the stream behind the last norm. Row r has
   n_new[r] tokens, then padding. begins [tokens, all]: whether a document does. length, start: a
   row's tokens so far, and of these those before its document. work: n (D + 3 E + 2 S) + 5 S + C. */
void NAME(step)(const Model *m, const Layer *layers, I n, I row, I all, I tokens, const I *n_new, const char *begins,
                I *length, I *start, float *x, float *work) {
  const I d = m->d, e = m->e, s = m->s, f = 2 * e + s;
  float *normed_D = work, *uvz_F = normed_D + n * d, *out_E = uvz_F + n * f, *angle_S = out_E + n * e;
  for (I t = 0; t < tokens; t++, x += all * d, begins += all) {
    for (I r = 0; r < n; r++) {
      if (t < n_new[r] && begins[r]) start[r] = length[r];
      const I p = length[r] - (m->own_grid ? start[r] : 0);
      rotary(p, m->rope_frequency, s / 2, angle_S + r * s);
      if (m->position_scale) rotary(p, m->position_frequency, d / 2, normed_D);
      for (I i = 0; m->position_scale && i < d; i++) x[r * d + i] += normed_D[i] * WIDE(*(T *)m->position_scale);
    }
    for (const Layer *l = layers; l < layers + m->layers; l++) {
      for (I r = 0; r < n; r++) NAME(norm)(l->norm_D, l->norm_bias_D, m->eps, x + r * d, d, normed_D + r * d);
      memset(uvz_F, 0, n * (f + e) * sizeof(float));
      NAME(linear)(l->in_FD, l->in_bias_F, normed_D, n, f, d, uvz_F);
      for (I i = 0; i < n * f; i++) uvz_F[i] /= 1 + exp_(-uvz_F[i]);
      for (I r = 0; r < n; r++)
        if (t < n_new[r])
          NAME(attend)(m, l, row + r, length[r] - (m->own_grid ? start[r] : 0), length[r] - start[r], angle_S + r * s,
                       uvz_F + r * f, angle_S + n * s, out_E + r * e);
      NAME(linear)(l->out_DE, l->out_bias_D, out_E, n, d, e, x);
    }
    for (I r = 0; r < n; r++) NAME(norm)(m->norm_D, m->norm_bias_D, m->last_eps, x + r * d, d, x + r * d);
    for (I r = 0; r < n; r++) length[r] += t < n_new[r];
  }
}
#endif
