#if defined(__x86_64__)
#define SOL_NS avx512
#define SOL_ISA_IS_AVX512 1
#include "kernel_table.h"

const sol::Kernels sol::KERNELS_AVX512 = sol::avx512::table(SOL_ISA_AVX512);
#endif
