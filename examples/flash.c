/* A trained FLASH writes on: ../lineartime/ops/decode.c, a folder of `lineartime export`, and libc.
     cc -O3 -march=native examples/flash.c -o flash -lm
     ./flash lineartime/models/small "It was" -n 300 -o state
     ./flash lineartime/models/small " And then" -i state -t 0.8 -s 7
   -n: most tokens to write. -t: temperature, 0 takes the likeliest token. -s: seed. -d: documents to write, each begun
   without a memory. -i, -o: files from which the state comes, and to which it goes; after any text it has one size. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#pragma GCC optimize("associative-math,no-signed-zeros,no-trapping-math,no-math-errno")  /* loops become vectors */
#pragma clang fp reassociate(on) contract(fast)
#include "../lineartime/ops/decode.c"
#define FAIL(...) (fprintf(stderr, "flash: " __VA_ARGS__), fputc('\n', stderr), exit(1))
#define GAP " \t\r\n"

/* D: of the stream. E: of u and v. S: of z. C: of a chunk. V: of the vocabulary; behind it is an entry for no token. */
typedef struct { const char *bytes; I n, rank, next; } Token;
static Token *token_V;
static I chain[1 << 16], vocab, end_of_document, by_words, is_bf16, state_size;
static Model m;
static Layer *layers;
static const char *header, *data, *data_end;  /* of model.safetensors */
static const void *embed_VD, *head_VD, *head_bias_V;
static float *x_D, *logits_V, *work;
/* What a file of the state has: this, where `next` is the token behind the text so far, then the layers' tensors. */
static struct { uint64_t model, check, random; I length, start, next; } *state;

static void *room_for(double n, double size) {
  void *made = n * size < PTRDIFF_MAX ? calloc(n * size + 1, 1) : 0;
  if (!made) FAIL("no memory for %g bytes", n * size);
  return made;
}
static char *read_file(const char *folder, const char *name, I *size) {
  char path[4096];
  FILE *file = snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name) < 4096 ? fopen(path, "rb") : 0;
  *size = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
  char *text = *size >= 0 && *size < INT64_MAX ? room_for(*size, 1) : 0;
  if (!text || fseek(file, 0, SEEK_SET) || fread(text, 1, *size, file) != (size_t)*size) FAIL("cannot read %s", path);
  fclose(file);
  return text;
}
static uint64_t hash(const void *from, I n, uint64_t h) {
  for (const unsigned char *p = from; n > 0; n--) h = (h ^ *p++) * 0x100000001b3u;
  return h;
}

/* JSON: the value of the next `name` from p on. Quotes in a string have a backslash: it is not taken for a name. */
static const char *find(const char *p, const char *name) {
  char key[80];
  const size_t n = snprintf(key, sizeof key, "\"%s\":", name);
  return p && (p = strstr(p, key)) ? p + n + strspn(p + n, GAP) : 0;
}
static double number(const char *text, const char *name, double least, double most, double otherwise) {
  const char *p = find(text, name);
  const double x = p && *p != 'n' ? strtod(p, 0) : otherwise;
  if (x != otherwise && !(x >= least && x <= most)) FAIL("%s is not a number from %g to %g", name, least, most);
  return x;
}
/* Where among some words a value is; a missing one counts as the first, at 0. */
static I choice(const char *text, const char *name, const char *words) {
  char word[32] = "";
  const char *p = find(text, name);
  if (p) sscanf(p + (*p == '"'), "%31[^\",}" GAP "]", word);
  if (!strstr(words, word)) FAIL("%s is %s, and this program knows %s", name, word, words);
  return strstr(words, word) - words;
}

/* The tokenizer: byte-level BPE. Tokens whose bytes have the same hash are a chain. */
static Token *token_of(const char *bytes, const char *end) {
  const I n = end - bytes;
  I i = chain[hash(bytes, n, 0) & 0xffff] - 1;
  while (i >= 0 && (token_V[i].n != n || memcmp(token_V[i].bytes, bytes, n))) i = token_V[i].next - 1;
  return token_V + (i < 0 ? vocab : i);
}
/* Appends a token's bytes, which JSON has as characters: those that print, and for the others those from U+0100 on. */
static const char *read_bytes(const char *p, char **to) {
  while (p && *p && *++p && *p != '"' && *p != ' ') {  /* older files have merges "a b" in place of ["a", "b"] */
    I c = (unsigned char)(*p == '\\' ? *++p : *p);
    if (c > 127) c = (c & 31) << 6 | (*++p & 63);
    *(*to)++ = (char)(c < 256 ? c : c < 289 ? c - 256 : c < 323 ? c - 162 : 173);
  }
  if (!p || !*p) FAIL("tokenizer.json is cut short, or no byte-level BPE");
  return p;
}
static void load_tokenizer(const char *folder) {
  I size, rank = 0;
  const char *text = read_file(folder, "tokenizer.json", &size), *p = find(text, "pre_tokenizer"), *bytes, *end;
  char *to = room_for(size, 2), *behind;
  choice(text, "normalizer", "null"), choice(text, "special", "true"), choice(p, "type", "ByteLevel");
  choice(p, "add_prefix_space", "false"), by_words = !choice(p, "use_regex", "true false");
  p = find(text, "model"), choice(p, "type", "BPE"), choice(p, "ignore_merges", "false");
  token_V = room_for(vocab + 1, sizeof(Token)), token_V[vocab].rank = INT64_MAX;
  for (p = find(p, "vocab"), p += p ? strspn(p, "{" GAP) : 0; p && *p == '"'; p = behind + strspn(behind, "," GAP)) {
    bytes = to, end = read_bytes(p, &to);
    const double id = strtod(end + strspn(end, "\":" GAP), &behind);
    if (!(id >= 0 && id < vocab) || token_V[(I)id].bytes) continue;
    I *first = &chain[hash(bytes, to - bytes, 0) & 0xffff];
    token_V[(I)id] = (Token){bytes, to - bytes, INT64_MAX, *first}, *first = id + 1;
  }
  for (p = find(p, "merges"), p += p ? strspn(p, "][" GAP) : 0; p && *p == '"'; p += strspn(p, "],[" GAP)) {
    bytes = to, end = read_bytes(p, &to), p = 1 + read_bytes(*end == '"' ? strchr(end + 1, '"') : end, &to);
    if (token_of(bytes, to)->bytes) token_of(bytes, to)->rank = rank++;
  }
  if (!p || *p != '}') FAIL("tokenizer.json is cut short, or no byte-level BPE");
}
/* White space, letters, digits and other signs as bits; a byte outside ASCII may be any but white space. */
static I kind(char c) { return c & 128 ? 14 : strchr("\t\n\v\f\r ", c) ? 1 : isalpha(c) ? 2 : isdigit(c) ? 4 : 8; }
/* GPT-2's words: 's, 't, ...; a space and characters of a kind; white space, whose last character a word takes. Beside
   other scripts' characters it cuts where this does not, but what stands across such a cut is never a token. */
static const char *word_end(const char *p) {
  for (const char *const *e = (const char *[]){"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", 0}; *e; e++)
    if (!strncmp(p, *e, strlen(*e))) return p + strlen(*e);
  const char *q = p + (*p == ' ' && kind(p[1]) > 1);
  do q++; while (*q && kind(q[-1]) & kind(*q));
  return kind(q[-1]) == 1 && *q && q - p > 1 ? q - 1 : q;
}
/* The tokens of a text. In each word the two neighbours that training joined first are joined, until none are. */
static I encode(const char *text, I *ids) {
  I total = 0;
  const char **at = room_for(strlen(text) + 1, sizeof(char *)), *end;  /* where a word's tokens begin */
  for (; *text; text = end) {
    I n = 0, best = 0, where = 0;
    for (end = by_words ? word_end(text) : text + strlen(text); text + n <= end; n++) at[n] = text + n;
    while (best < INT64_MAX) {
      best = INT64_MAX;
      for (I i = 1, rank; i + 1 < n; i++)
        if ((rank = token_of(at[i - 1], at[i + 1])->rank) < best) best = rank, where = i;
      if (best < INT64_MAX) memmove(at + where, at + where + 1, (--n - where) * sizeof *at);
    }
    for (I i = 0; i + 1 < n; i++)
      if ((ids[total++] = token_of(at[i], at[i + 1]) - token_V) == vocab) FAIL("a byte of the text has no token");
  }
  return total;
}
/* The model: the numbers of config.json, and the weights of model.safetensors as they are there. */
static float value(const void *w, I i) { return is_bf16 ? wide_bf16(((uint16_t *)w)[i]) : ((float *)w)[i]; }
static const void *weight(const char *name, I layer, double n) {
  char full[64], *comma = "";
  if (layer >= 0) snprintf(full, sizeof full, "layers.%d.%s", (int)layer, name), name = full;
  const char *p = find(find(header, name), "data_offsets");
  const double size = is_bf16 ? 2 : 4, begin = p ? strtod(p + 1, &comma) : -1, end = *comma ? strtod(comma + 1, 0) : 0;
  if (!(begin >= 0 && end <= data_end - data && end - begin == n * size && fmod(begin, size) == 0))
    FAIL("model.safetensors has no %s of %g numbers", name, n);
  return data + (I)begin;
}
static void load_model(const char *folder) {
  static const char *const ONLY[] = {"ffn", "gau", "attn_type", "mixed_chunk", "attn_kernel", "relu2", "activation",
    "silu", "causal", "true", "gate", "true", "n_heads", "1", "chunk_parts", "both", "overlap", "false", "layers", "[]",
    "document_mask", "exact", "token_shift", "false", "norm", "layer_norm", "head_norm", "null", "bias", "true",
    "abs_pos", "scaled_sin", "position_bias", "true", "rotary_dim", "null", "linear_divisor", "null"};
  I size, n = 0;
  const char *c = read_file(folder, "config.json", &size);
  if (size < 2 || (c[size - 1] != '}' && strcmp(c + size - 2, "}\n"))) FAIL("config.json is cut short");
  for (I i = 0; i < 38; i += 2) choice(c, ONLY[i], ONLY[i + 1]);
  vocab = number(c, "vocab_size", 1, 1 << 24, NAN), end_of_document = number(c, "end_of_document", 0, vocab - 1, NAN);
  const I d = m.d = number(c, "d_model", 1, 1 << 17, NAN), s = m.s = number(c, "query_key_dim", 1, 1 << 16, NAN);
  const I e = m.e = rint(d * number(c, "expansion_factor", 1, 1024, NAN)), f = 2 * e + s;
  m.layers = number(c, "n_layers", 1, 1024, NAN), m.c = number(c, "chunk_size", 1, 511, NAN);
  m.k = number(c, "key_conv", 0, 256, 0), m.local_key_conv = choice(c, "local_key_conv", "false true");
  m.own_grid = choice(c, "document_grid", "row own"), m.linear_rope = !choice(c, "linear_rope", "true false");
  const I pooling = choice(c, "chunk_pooling", "mean sum written"), gated = choice(c, "linear_gate", "false true") > 0;
  m.eps = m.last_eps = number(c, "norm_eps", 0, 1e300, 1e-5), m.mean = pooling == 0;
  double *of_D = room_for(d, sizeof(double)), *of_S = room_for(s, sizeof(double));
  for (I i = 0; i < d / 2; i++) of_D[i] = pow(1e4, -(double)i / (d / 2));
  for (I i = choice(c, "rel_pos", "rope null") ? s : 0; i < s / 2; i++)
    of_S[i] = pow(number(c, "rope_base", 1, 1e300, 1e4), -(double)i / (s / 2));
  m.position_frequency = of_D, m.rope_frequency = of_S;
  char *text = read_file(folder, "model.safetensors", &size);
  const uint64_t model = hash(text, size, hash(c, strlen(c), 1));
  memcpy(&n, text, size < 8 ? 0 : 8);
  if (n < 2 || n % 8 || n > size - 8) FAIL("model.safetensors is cut short");
  data = text + 8 + n, data_end = text + size, header = memmove(text, text + 8, n), text[n] = 0;
  is_bf16 = choice(find(header, "embed.weight"), "dtype", "F32 BF16") > 0;
  embed_VD = weight("embed.weight", -1, (double)vocab * d), head_bias_V = weight("head_bias", -1, vocab);
  head_VD = choice(c, "tied_head", "true false") ? weight("head_weight", -1, (double)vocab * d) : embed_VD;
  m.norm_D = weight("norm.weight", -1, d), m.norm_bias_D = weight("norm.bias", -1, d);
  m.position_scale = weight("abs_pos.scalar", -1, 1);
  const struct { const char *name; double n; } parts[] = {{"norm.weight", d}, {"norm.bias", d},
    {"in_proj.weight", (double)f * d}, {"in_proj.bias", f}, {"scale_offset.gamma", 4 * s}, {"scale_offset.beta", 4 * s},
    {"out_proj.weight", (double)d * e}, {"out_proj.bias", d}, {"key_conv.taps", m.k * s},
    {"linear_gate.weight", gated * s}, {"linear_gate.bias", gated}, {"rel_pos_bias.weight", 2 * m.c - 1}};
  const I width = is_bf16 ? 2 : 4, floats = s * e + (pooling > 5) * (m.c + 1), numbers = m.c * (2 * s + e) + m.k * s;
  state = room_for(state_size = sizeof *state + m.layers * (4 * floats + width * numbers), 1);
  layers = room_for(m.layers, sizeof(Layer)), state->model = model, state->next = end_of_document;
  for (I i = 0; i < m.layers; i++) {
    const void *found[12];
    for (I j = 0; j < 12; j++) found[j] = parts[j].n > 0 ? weight(parts[j].name, i, parts[j].n) : 0;
    Layer *l = memcpy(layers + i, found, 11 * sizeof *found);  /* as a `Layer` begins */
    l->bias_C = room_for(m.c, sizeof(float));
    for (I j = 0; j < m.c; j++) l->bias_C[j] = value(found[11], j);
    l->kv_BSE = (float *)(state + 1) + i * floats;
    if (pooling > 5) l->gate_BC = l->kv_BSE + s * e, l->written_B = l->gate_BC + m.c;
    char *at = (char *)(state + 1) + m.layers * 4 * floats + i * width * numbers;
    l->k_quad_BCS = at, l->k_lin_BCS = at + width * m.c * s, l->v_BCE = at + 2 * width * m.c * s;
    l->z_BKS = at + width * m.c * (2 * s + e);
  }
  x_D = room_for(d, 4), logits_V = room_for(vocab, 4), work = room_for(d + 3 * e + 7 * s + m.c, 4);
}

/* The next token: the likeliest, after noise that makes its chance e^(logit / temperature) over their sum (Gumbel). */
static I choose(double temperature) {
  I best = 0;
  double highest = -INFINITY;
  memset(logits_V, 0, vocab * sizeof(float));
  if (is_bf16) linear_bfloat16(head_VD, head_bias_V, x_D, 1, vocab, m.d, logits_V);
  else linear_float32(head_VD, head_bias_V, x_D, 1, vocab, m.d, logits_V);
  for (I i = 0; i < vocab; i++) {
    if (!(logits_V[i] < INFINITY)) FAIL("the logits are not numbers: the weights are damaged");
    state->random = state->random * 6364136223846793005u + 1442695040888963407u;
    const double uniform = ((state->random >> 12) + 0.5) * 0x1p-52;
    const double x = logits_V[i] - (temperature > 0 ? temperature * log(-log(uniform)) : 0);
    if (x > highest) highest = x, best = i;
  }
  return best;
}
static uint64_t checksum(void) { return hash((char *)state + 16, state_size - 16, state->model); }

int main(int argc, char **argv) {
  const char *word[128] = {['n'] = "200", ['t'] = "0", ['d'] = "1"};
  for (int i = 3; i < argc; i += 2)
    if (argv[i][0] == '-' && strchr("ntdsio", argv[i][1]) && i + 1 < argc) word[argv[i][1] & 127] = argv[i + 1];
    else argc = 0;
  if (argc < 3) FAIL("flash FOLDER TEXT [-n TOKENS] [-t TEMPERATURE] [-s SEED] [-d DOCUMENTS] [-i STATE] [-o STATE]");
  if (!state) load_model(argv[1]), load_tokenizer(argv[1]);  /* browser/ calls this again and again */
  I *ids = room_for(strlen(argv[2]) + 1, sizeof(I)), n = encode(argv[2], ids), one = 1, size;
  if (word['i']) {
    const char *file = read_file("", word['i'], &size);
    if (size != state_size || memcmp(state, file, 8) || (memcpy(state, file, size), state->check != checksum())
        || state->start < 0 || state->start > state->length || state->next < 0 || state->next >= vocab)
      FAIL("%s is damaged, or another model's state", word['i']);
  }
  if (word['s']) state->random = hash(word['s'], strlen(word['s']), 2);
  fputs(argv[2], stdout);
  for (I i = 0, documents = atol(word['d']); i < n + atol(word['n']); i++) {  /* reads a token, and has the next */
    const char begins = state->next == end_of_document;
    for (I j = 0; j < m.d; j++) x_D[j] = value(embed_VD, state->next * m.d + j);
    (is_bf16 ? step_bfloat16 : step_float32)
      (&m, layers, 1, 0, 1, 1, &one, &begins, &state->length, &state->start, x_D, work);
    state->next = i < n ? ids[i] : choose(atof(word['t']));
    if (i < n) continue;
    if (state->next == end_of_document && --documents < 1) break;
    if (token_V[state->next].n) fwrite(token_V[state->next].bytes, 1, token_V[state->next].n, stdout), fflush(stdout);
  }
  putchar('\n'), fflush(stdout);
  if (word['o']) {
    FILE *file = fopen(word['o'], "wb");
    state->check = checksum();
    if (!file || fwrite(state, state_size, 1, file) != 1 || fclose(file)) FAIL("cannot write %s", word['o']);
  }
}
