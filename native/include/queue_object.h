// What the Python types of the page queue and of its iterator share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "page_queue.h"

namespace kvquota {

struct QueueObject {
  PyObject_HEAD PageQueue* queue;
  PyObject* blocks;  // a tuple: keeps every block alive
  PyTypeObject*
      block_type;  // with `block_id` in a slot at `id_offset`; null where that differs between blocks
  Py_ssize_t id_offset;
};

// A new reference.
inline PyObject* block_at(QueueObject* self, int32_t index) {
  PyObject* block = PyTuple_GET_ITEM(self->blocks, index);
  Py_INCREF(block);
  return block;
}

// Of the free blocks behind `block` (-1: of all), in the order in which they would be handed out. A new
// reference; null with an exception set.
PyObject* iterate_after(QueueObject* queue, int32_t block);
// Before the first iterate_after.
void make_iterator_type();

constexpr unsigned int kQueueFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE;

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

inline PyObject* make_type(PyType_Spec& spec) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw pybind11::error_already_set();
  return type;
}

}  // namespace kvquota
