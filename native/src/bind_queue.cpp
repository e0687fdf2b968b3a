// PageQueue as a plain CPython type: dispatch through pybind11 would cost more than the work of the hot
// methods, and an engine calls them for each block it allocates or frees.
#include <pybind11/stl.h>
#include <structmember.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bind.h"
#include "queue_object.h"

namespace py = pybind11;

namespace kvquota {
namespace {

PyObject* block_id_name = nullptr;

QueueObject* as_queue(PyObject* self) { return reinterpret_cast<QueueObject*>(self); }

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

// The index of a block of this queue; -1 with an exception set for anything else.
int32_t index_of(QueueObject* self, PyObject* block) {
  PyObject* value = nullptr;
  if (Py_TYPE(block) == self->block_type) {
    value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + self->id_offset);
    Py_XINCREF(value);
  }
  if (value == nullptr) value = PyObject_GetAttr(block, block_id_name);
  if (value == nullptr) return -1;
  const long index = PyLong_AsLong(value);
  Py_DECREF(value);
  if (index == -1 && PyErr_Occurred() != nullptr) return -1;
  if (index < 0 || index >= PyTuple_GET_SIZE(self->blocks) ||
      PyTuple_GET_ITEM(self->blocks, index) != block) {
    PyErr_Format(PyExc_ValueError, "%R is no block of this queue", block);
    return -1;
  }
  return static_cast<int32_t>(index);
}

bool to_page(PyObject* value, int32_t& page) {
  const long number = PyLong_AsLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) return false;
  if (number < 0 || number > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "no page %ld", number);
    return false;
  }
  page = static_cast<int32_t>(number);
  return true;
}

PyObject* to_list(const std::vector<int32_t>& numbers) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
  for (std::size_t i = 0; list != nullptr && i < numbers.size(); ++i) {
    PyObject* number = PyLong_FromLong(numbers[i]);
    if (number == nullptr)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
  }
  return list;
}

bool available(QueueObject* self, Py_ssize_t count) {
  if (count >= 0 && count <= self->queue->num_free()) return true;
  PyErr_Format(PyExc_ValueError, "cannot hand out %zd blocks: %lld are free", count,
               static_cast<long long>(self->queue->num_free()));
  return false;
}

PyObject* popleft(PyObject* object, PyObject*) {
  QueueObject* self = as_queue(object);
  if (!available(self, 1)) return nullptr;
  return guarded([&] {
    PyObject* popped = nullptr;
    self->queue->pop(1, [&](int32_t block) { popped = block_at(self, block); });
    return popped;
  });
}

PyObject* popleft_n(PyObject* object, PyObject* argument) {
  QueueObject* self = as_queue(object);
  const Py_ssize_t count = PyLong_AsSsize_t(argument);
  if (count == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (!available(self, count)) return nullptr;
  PyObject* popped = PyList_New(count);
  if (popped == nullptr) return nullptr;
  // Making the list may have run the garbage collector, and with it code that uses this queue.
  if (!available(self, count)) {
    Py_DECREF(popped);
    return nullptr;
  }
  return guarded([&] {
    Py_ssize_t i = 0;
    self->queue->pop(count, [&](int32_t block) { PyList_SET_ITEM(popped, i++, block_at(self, block)); });
    return popped;
  });
}

PyObject* remove(PyObject* object, PyObject* block) {
  QueueObject* self = as_queue(object);
  const int32_t index = index_of(self, block);
  if (index < 0) return nullptr;
  return guarded([&] {
    self->queue->remove(index);
    Py_RETURN_NONE;
  });
}

PyObject* append(PyObject* object, PyObject* block) {
  QueueObject* self = as_queue(object);
  const int32_t index = index_of(self, block);
  if (index < 0) return nullptr;
  return guarded([&] {
    self->queue->free(&index, 1, true);
    Py_RETURN_NONE;
  });
}

PyObject* free_all(QueueObject* self, PyObject* blocks, bool cached) {
  PyObject* sequence = PySequence_Fast(blocks, "expected a sequence of blocks");
  if (sequence == nullptr) return nullptr;
  PyObject* result = guarded([&]() -> PyObject* {
    int32_t few[64];
    std::vector<int32_t> many;
    int32_t* indices = few;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    if (count > 64) {
      many.resize(static_cast<std::size_t>(count));
      indices = many.data();
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      // Looking a block up may run Python code, which may shorten the list.
      if (i >= PySequence_Fast_GET_SIZE(sequence)) {
        throw std::invalid_argument("the list of blocks changed while it was read");
      }
      PyObject* block = PySequence_Fast_GET_ITEM(sequence, i);
      Py_INCREF(block);
      indices[i] = index_of(self, block);
      Py_DECREF(block);
      if (indices[i] < 0) return nullptr;
    }
    self->queue->free(indices, static_cast<std::size_t>(count), cached);
    Py_RETURN_NONE;
  });
  Py_DECREF(sequence);
  return result;
}

PyObject* append_n(PyObject* self, PyObject* blocks) { return free_all(as_queue(self), blocks, true); }

PyObject* prepend_n(PyObject* self, PyObject* blocks) { return free_all(as_queue(self), blocks, false); }

PyObject* get_all_free_blocks(PyObject* object, PyObject*) {
  QueueObject* self = as_queue(object);
  return guarded([&] {
    std::vector<int32_t> indices;
    for (int32_t i = self->queue->after(-1); i >= 0; i = self->queue->after(i)) indices.push_back(i);
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(indices.size()));
    for (std::size_t i = 0; list != nullptr && i < indices.size(); ++i) {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), block_at(self, indices[i]));
    }
    return list;
  });
}

PyObject* iter_blocks_after(PyObject* object, PyObject* cursor) {
  QueueObject* self = as_queue(object);
  int32_t index = -1;
  if (cursor != Py_None) {
    index = index_of(self, cursor);
    if (index < 0) return nullptr;
  }
  return iterate_after(self, index);
}

PyObject* allow(PyObject* self, PyObject* argument) {
  const Py_ssize_t pages = PyLong_AsSsize_t(argument);
  if (pages == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] {
    as_queue(self)->queue->allow(pages);
    Py_RETURN_NONE;
  });
}

PyObject* put(PyObject* self, PyObject* argument) {
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] {
    as_queue(self)->queue->put(page);
    Py_RETURN_NONE;
  });
}

PyObject* give(PyObject* self, PyObject* argument) {
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] {
    as_queue(self)->queue->give(page);
    Py_RETURN_NONE;
  });
}

PyObject* grown(PyObject* self, PyObject*) {
  if (!as_queue(self)->queue->has_grown()) return PyList_New(0);
  return guarded([&] { return to_list(as_queue(self)->queue->grown()); });
}

PyObject* victims(PyObject* self, PyObject* argument) {
  const Py_ssize_t count = PyLong_AsSsize_t(argument);
  if (count == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] { return to_list(as_queue(self)->queue->victims(count)); });
}

PyObject* take(PyObject* object, PyObject* argument) {
  QueueObject* self = as_queue(object);
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] {
    const std::vector<int32_t> cached = self->queue->take(page);
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(cached.size()));
    for (std::size_t i = 0; list != nullptr && i < cached.size(); ++i) {
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), block_at(self, cached[i]));
    }
    return list;
  });
}

PyObject* drain(PyObject* self, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"count", "keep", nullptr};
  Py_ssize_t count = 0;
  PyObject* keep = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|O:drain", const_cast<char**>(names), &count,
                                   &keep)) {
    return nullptr;
  }
  std::vector<int32_t> kept;
  if (keep != nullptr) {
    PyObject* sequence = PySequence_Fast(keep, "keep: expected a sequence of pages");
    if (sequence == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      kept.push_back(0);
      if (!to_page(PySequence_Fast_GET_ITEM(sequence, i), kept.back())) {
        Py_DECREF(sequence);
        return nullptr;
      }
    }
    Py_DECREF(sequence);
  }
  return guarded([&] { return to_list(as_queue(self)->queue->drain(count, kept)); });
}

PyObject* is_draining(PyObject* object, PyObject* block) {
  const int32_t index = index_of(as_queue(object), block);
  if (index < 0) return nullptr;
  return PyBool_FromLong(as_queue(object)->queue->is_draining(index));
}

PyObject* usage(PyObject* self, PyObject*) {
  const PageQueue::Usage usage = as_queue(self)->queue->usage();
  return Py_BuildValue("(LLLL)", static_cast<long long>(usage.pinned),
                       static_cast<long long>(usage.evictable), static_cast<long long>(usage.empty),
                       static_cast<long long>(usage.draining));
}

PyObject* used_blocks(PyObject* self, PyObject* argument) {
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] { return PyLong_FromLong(as_queue(self)->queue->used_blocks(page)); });
}

PyObject* in_circulation(PyObject* self, PyObject* argument) {
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] { return PyBool_FromLong(as_queue(self)->queue->in_circulation(page)); });
}

PyObject* check(PyObject* self, PyObject*) {
  return guarded([&] {
    as_queue(self)->queue->check();
    Py_RETURN_NONE;
  });
}

PyObject* num_free_blocks(PyObject* self, void*) {
  return PyLong_FromLongLong(as_queue(self)->queue->num_free());
}

PyObject* num_used_blocks(PyObject* self, void*) {
  return PyLong_FromLongLong(as_queue(self)->queue->num_used());
}

PyObject* num_uncached_blocks(PyObject* self, void*) {
  return PyLong_FromLongLong(as_queue(self)->queue->num_uncached());
}

PyObject* max_free_blocks(PyObject* self, void*) {
  return PyLong_FromLongLong(as_queue(self)->queue->max_free());
}

PyObject* for_running(PyObject* self, void*) { return PyBool_FromLong(as_queue(self)->queue->for_running); }

int set_for_running(PyObject* self, PyObject* value, void*) {
  if (value == nullptr || !PyBool_Check(value)) {
    PyErr_SetString(PyExc_TypeError, "for_running: expected a bool");
    return -1;
  }
  as_queue(self)->queue->for_running = value == Py_True;
  return 0;
}

// Where every block is of one class that keeps `block_id` in a slot, the slot is read without a look-up.
void find_slot(QueueObject* self) {
  self->block_type = nullptr;
  const Py_ssize_t count = PyTuple_GET_SIZE(self->blocks);
  if (count == 0) return;
  PyTypeObject* type = Py_TYPE(PyTuple_GET_ITEM(self->blocks, 0));
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (Py_TYPE(PyTuple_GET_ITEM(self->blocks, i)) != type) return;
  }
  PyObject* descriptor = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), block_id_name);
  if (descriptor == nullptr) {
    PyErr_Clear();
    return;
  }
  if (Py_TYPE(descriptor) == &PyMemberDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(descriptor))) {
    const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
    if (member->type == T_OBJECT_EX) {
      Py_INCREF(type);
      self->block_type = type;
      self->id_offset = member->offset;
    }
  }
  Py_DECREF(descriptor);
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
  find_slot(self);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* block = PyTuple_GET_ITEM(kept, i);
    if (index_of(self, block) != i) {
      if (PyErr_Occurred() == nullptr || PyErr_ExceptionMatches(PyExc_ValueError) != 0) {
        PyErr_Format(PyExc_ValueError, "%R at index %zd: expected the block with block_id %zd", block, i, i);
      }
      Py_DECREF(object);
      return nullptr;
    }
  }
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

PyMethodDef queue_methods[] = {
    {"popleft", popleft, METH_NOARGS, nullptr},
    {"popleft_n", popleft_n, METH_O, nullptr},
    {"remove", remove, METH_O, nullptr},
    {"append", append, METH_O, nullptr},
    {"append_n", append_n, METH_O, nullptr},
    {"prepend_n", prepend_n, METH_O, nullptr},
    {"get_all_free_blocks", get_all_free_blocks, METH_NOARGS, nullptr},
    {"iter_blocks_after", iter_blocks_after, METH_O, nullptr},
    {"allow", allow, METH_O, nullptr},
    {"put", put, METH_O, nullptr},
    {"grown", grown, METH_NOARGS, nullptr},
    {"victims", victims, METH_O, nullptr},
    {"take", take, METH_O, nullptr},
    {"give", give, METH_O, nullptr},
    {"drain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(drain)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"is_draining", is_draining, METH_O, nullptr},
    {"usage", usage, METH_NOARGS, nullptr},
    {"used_blocks", used_blocks, METH_O, nullptr},
    {"in_circulation", in_circulation, METH_O, nullptr},
    {"check", check, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef queue_properties[] = {
    {"num_free_blocks", num_free_blocks, nullptr, nullptr, nullptr},
    {"num_uncached_blocks", num_uncached_blocks, nullptr, nullptr, nullptr},
    {"num_used_blocks", num_used_blocks, nullptr, nullptr, nullptr},
    {"max_free_blocks", max_free_blocks, nullptr, nullptr, nullptr},
    {"for_running", for_running, set_for_running, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot queue_slots[] = {
    {Py_tp_new, slot(queue_new)},           {Py_tp_dealloc, slot(queue_dealloc)},
    {Py_tp_traverse, slot(queue_traverse)}, {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_properties},       {0, nullptr},
};

PyType_Spec queue_spec = {"kvquota.native._native.PageQueue", sizeof(QueueObject), 0, kQueueFlags, queue_slots};
}  // namespace

void bind_queue(py::module_& m) {
  block_id_name = PyUnicode_InternFromString("block_id");
  if (block_id_name == nullptr) throw py::error_already_set();
  make_iterator_type();
  m.attr("PageQueue") = py::reinterpret_steal<py::object>(make_type(queue_spec));
}

}  // namespace kvquota
