// Packed weights as the kernels take them, checked.
#pragma once

#include "kernels.h"
#include "sol_cpu.h"

namespace sol {

// Fills `out` from a segment whose every field is checked; `what` names it in the message. The contents of `packed` are
// not looked at (sol_check_packed does that), perm is: every entry must be a column and none may come twice.
int32_t open_segment(const Kernels& kernels, const SolSegment& segment, const char* what, PackedMatrix* out);

}  // namespace sol
