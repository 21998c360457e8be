// How a function of the C ABI reports what went wrong.
#pragma once

#include <cstdint>

namespace sol {

// Keeps the message for sol_last_error() of this thread; gives `code` back, so that a check reads
// `return fail(SOL_E_ARGUMENT, "cols is %lld; ...", cols)`.
__attribute__((format(printf, 2, 3))) int32_t fail(int32_t code, const char* format, ...);

}  // namespace sol
