#if defined(__x86_64__)
#define SOL_NS avx512vnni
#define SOL_ISA_IS_AVX512 1
#define SOL_ISA_HAS_VNNI 1
#include "kernel_table.h"

const sol::Kernels sol::KERNELS_AVX512VNNI = sol::avx512vnni::table(SOL_ISA_AVX512VNNI);
#endif
