#include "bind.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "kvquota's native parts";
  kvquota::bind_memory(m);
  kvquota::bind_queue(m);
  kvquota::bind_segment(m);
}
