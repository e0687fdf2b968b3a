// PageQueue as a plain CPython type: dispatch through pybind11 would cost more than the work of the hot
// methods, and an engine calls them for each block it allocates or frees.
#include <pybind11/stl.h>
#include <structmember.h>

#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "queue_object.h"

namespace py = pybind11;

namespace kvquota {
namespace {

PyObject* no_reference = nullptr;
PyObject* one_reference = nullptr;

void set_references(QueueObject* self, PageQueue::Range blocks, PyObject* number) {
  for (int32_t i = blocks.first; i < blocks.second; ++i) {
    PyObject*& references = in_slot(PyTuple_GET_ITEM(self->blocks, i), self->references_offset);
    PyObject* before = references;
    Py_INCREF(number);
    references = number;
    Py_XDECREF(before);
  }
}

// Where an instance of `type` keeps `name`; -1 where that is not a slot.
Py_ssize_t slot_offset(PyTypeObject* type, const char* name) {
  PyObject* descriptor = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (descriptor == nullptr) {
    PyErr_Clear();
    return -1;
  }
  Py_ssize_t offset = -1;
  if (Py_TYPE(descriptor) == &PyMemberDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(descriptor))) {
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
    if (member->type == T_OBJECT_EX) offset = member->offset;
  }
  Py_DECREF(descriptor);
  return offset;
}

// Reads what the queue must know of its blocks. False with an exception set where they do not fit.
bool learn_blocks(QueueObject* self) {
  const Py_ssize_t count = PyTuple_GET_SIZE(self->blocks);
  if (count == 0) return true;
  PyTypeObject* type = Py_TYPE(PyTuple_GET_ITEM(self->blocks, 0));
  self->id_offset = slot_offset(type, "block_id");
  self->references_offset = slot_offset(type, "ref_cnt");
  if (self->id_offset < 0 || self->references_offset < 0) {
    PyErr_Format(PyExc_TypeError, "blocks: expected a class with block_id and ref_cnt in __slots__, got %R",
                 type);
    return false;
  }
  Py_INCREF(type);
  self->block_type = type;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* block = PyTuple_GET_ITEM(self->blocks, i);
    if (Py_TYPE(block) != type) {
      PyErr_Format(PyExc_TypeError, "blocks: expected all of one class, got %R among %R", block, type);
      return false;
    }
    if (index_of(self, block) != i) {
      PyErr_Clear();
      PyErr_Format(PyExc_ValueError, "%R at index %zd: expected the block with block_id %zd", block, i, i);
      return false;
    }
  }
  return true;
}

PyObject* queue_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"blocks", "pages", nullptr};
  PyObject* blocks = nullptr;
  PyObject* pages = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:PageQueue", const_cast<char**>(names), &blocks,
                                   &pages)) {
    return nullptr;
  }
  std::vector<PageQueue::Range> ranges;
  try {
    ranges = py::cast<std::vector<PageQueue::Range>>(py::handle(pages));
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "pages: expected a sequence of (first, end) pairs of ints");
    return nullptr;
  }
  PyObject* kept = PySequence_Tuple(blocks);
  if (kept == nullptr) return nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(kept);
  std::unique_ptr<PageQueue> queue;
  PyObject* none = guarded([&] {
    queue = std::make_unique<PageQueue>(static_cast<int32_t>(count), ranges);
    Py_RETURN_NONE;
  });
  PyObject* object = none != nullptr ? type->tp_alloc(type, 0) : nullptr;
  Py_XDECREF(none);
  if (object == nullptr) {
    Py_DECREF(kept);
    return nullptr;
  }
  QueueObject* self = as_queue(object);
  self->queue = queue.release();
  self->blocks = kept;
  if (!learn_blocks(self)) {
    Py_DECREF(object);
    return nullptr;
  }
  hold(self, {0, static_cast<int32_t>(count)});
  return object;
}

// No tp_clear: a cycle through the tuple goes through a block that was changed after the tuple was made, and
// that block can be cleared. So the methods never meet a queue without its blocks.
int queue_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(as_queue(object)->blocks);
  Py_VISIT(as_queue(object)->block_type);
  return 0;
}

void queue_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  QueueObject* self = as_queue(object);
  delete self->queue;
  Py_CLEAR(self->blocks);
  Py_CLEAR(self->block_type);
  type->tp_free(object);
  Py_DECREF(type);
}

PyType_Slot queue_slots[] = {
    {Py_tp_new, slot(queue_new)},           {Py_tp_dealloc, slot(queue_dealloc)},
    {Py_tp_traverse, slot(queue_traverse)}, {Py_tp_methods, nullptr},
    {Py_tp_getset, nullptr},                {0, nullptr},
};

PyType_Spec queue_spec = {"kvquota.native._native.PageQueue", sizeof(QueueObject), 0, kQueueFlags, queue_slots};

// Both tables as one, which lives as long as the type: for ever.
template <typename Entry>
void* join(const std::vector<Entry>& first, const std::vector<Entry>& second) {
  static std::vector<Entry> joined;
  joined = first;
  joined.insert(joined.end(), second.begin(), second.end());
  joined.push_back({});
  return joined.data();
}

}  // namespace

void hold(QueueObject* self, PageQueue::Range blocks) { set_references(self, blocks, one_reference); }

void let_go(QueueObject* self, PageQueue::Range blocks) { set_references(self, blocks, no_reference); }

void check_references(QueueObject* self) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->blocks); ++i) {
    const auto block = static_cast<int32_t>(i);
    const bool withheld = self->queue->is_withheld(block);
    if (!withheld && !self->queue->is_free(block)) continue;
    PyObject* number = in_slot(PyTuple_GET_ITEM(self->blocks, i), self->references_offset);
    int overflow = 0;
    const long references =
        number != nullptr && PyLong_Check(number) ? PyLong_AsLongAndOverflow(number, &overflow) : -1;
    if (references != withheld) {
      throw PageQueue::Corrupt("block " + std::to_string(i) + (withheld ? " is withheld" : " is free") +
                               ": ref_cnt " + std::to_string(references) + ", expected " +
                               std::to_string(withheld));
    }
  }
}

void bind_queue(py::module_& m) {
  no_reference = PyLong_FromLong(0);
  one_reference = PyLong_FromLong(1);
  if (no_reference == nullptr || one_reference == nullptr) throw py::error_already_set();
  make_iterator_type();
  queue_slots[3].pfunc = join(kEngineMethods, kBalloonMethods);
  queue_slots[4].pfunc = join(kEngineProperties, kBalloonProperties);
  m.attr("PageQueue") = py::reinterpret_steal<py::object>(make_type(queue_spec));
}

}  // namespace kvquota
