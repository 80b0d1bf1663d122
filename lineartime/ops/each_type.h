/* Compiles SOURCE, which includes this file, for each type of numbers T: float, bfloat16, and with
   IN_FLOAT64 also double. R is the type of sums. */
#define R float
#define EXP exp_
#define T float
#define WIDE(x) (x)
#define NARROW(x) (x)
#define NAME(name) name##_float32
#include SOURCE
#undef T
#undef WIDE
#undef NARROW
#undef NAME
#define T uint16_t
#define WIDE(x) wide_bf16(x)
#define NARROW(x) narrow_bf16(x)
#define NAME(name) name##_bfloat16
#include SOURCE
#ifdef IN_FLOAT64
#undef T
#undef R
#undef EXP
#undef WIDE
#undef NARROW
#undef NAME
#define T double
#define R double
#define EXP exp
#define WIDE(x) (x)
#define NARROW(x) (x)
#define NAME(name) name##_float64
#include SOURCE
#endif
