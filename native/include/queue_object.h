// What the parts of the Python types of the page queue and of its iterator share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

#include "page_queue.h"

namespace kvquota {

struct QueueObject {
  PyObject_HEAD PageQueue* queue;
  PyObject* blocks;          // a tuple: keeps every block alive
  PyTypeObject* block_type;  // of every block
  Py_ssize_t id_offset;      // of the slots `block_id` and `ref_cnt` in a block
  Py_ssize_t references_offset;
};

inline QueueObject* as_queue(PyObject* self) { return reinterpret_cast<QueueObject*>(self); }

inline PyObject*& in_slot(PyObject* block, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + offset);
}

// A new reference.
inline PyObject* block_at(QueueObject* self, int32_t index) {
  PyObject* block = PyTuple_GET_ITEM(self->blocks, index);
  Py_INCREF(block);
  return block;
}

// The index of a block of this queue; -1 with ValueError set for anything else. Runs no Python code before that.
inline int32_t index_of(QueueObject* self, PyObject* block) {
  if (Py_TYPE(block) == self->block_type) {
    PyObject* number = in_slot(block, self->id_offset);
    int overflow = 0;
    const long index =
        number != nullptr && PyLong_Check(number) ? PyLong_AsLongAndOverflow(number, &overflow) : -1;
    if (index >= 0 && index < PyTuple_GET_SIZE(self->blocks) &&
        PyTuple_GET_ITEM(self->blocks, index) == block) {
      return static_cast<int32_t>(index);
    }
  }
  PyErr_Format(PyExc_ValueError, "%R is no block of this queue", block);
  return -1;
}

// A withheld block looks to the engine like one that a request holds: it has one reference, the balloon's. A
// block that comes into circulation has none.
void hold(QueueObject* self, PageQueue::Range blocks);
void let_go(QueueObject* self, PageQueue::Range blocks);
// Throws Corrupt where a withheld or a free block has another number of references.
void check_references(QueueObject* self);

// Runs `body`, and makes Python's exceptions of what it throws.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const PageQueue::Corrupt& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return nullptr;
}

// The methods and properties of each side.
extern const std::vector<PyMethodDef> kEngineMethods;
extern const std::vector<PyMethodDef> kBalloonMethods;
extern const std::vector<PyGetSetDef> kEngineProperties;
extern const std::vector<PyGetSetDef> kBalloonProperties;

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
