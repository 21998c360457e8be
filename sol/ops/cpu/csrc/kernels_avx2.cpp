#if defined(__x86_64__)
#define SOL_NS avx2
#define SOL_ISA_IS_AVX2 1
#include "kernel_table.h"

const sol::Kernels sol::KERNELS_AVX2 = sol::avx2::table(SOL_ISA_AVX2);
#endif
