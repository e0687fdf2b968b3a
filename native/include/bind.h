// What each part adds to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace kvquota {

void bind_memory(pybind11::module_& m);
void bind_queue(pybind11::module_& m);
void bind_segment(pybind11::module_& m);

}  // namespace kvquota
