// What Python calls of the families merge, claim and signature.
#include "bindings.hpp"

namespace sm {

void bind_merge(nb::module_ &) {}

}  // namespace sm
