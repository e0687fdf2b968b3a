// The engine's side of PageQueue: the interface of vLLM's free list.
#include <vector>

#include "queue_object.h"

namespace kvquota {
namespace {

bool available(QueueObject* self, Py_ssize_t count) {
  if (count >= 0 && count <= self->queue->num_free()) return true;
  PyErr_Format(PyExc_ValueError, "cannot hand out %zd blocks: %lld are free", count,
               static_cast<long long>(self->queue->num_free()));
  return false;
}

template <typename Emit>
void pop(QueueObject* self, Py_ssize_t count, Emit emit) {
  const std::vector<int32_t>& grown = self->queue->newly_grown();
  const std::size_t before = grown.size();
  self->queue->pop(count, [&](int32_t block) { emit(block_at(self, block)); });
  for (std::size_t i = before; i < grown.size(); ++i) let_go(self, self->queue->blocks_of(grown[i]));
}

PyObject* popleft(PyObject* object, PyObject*) {
  QueueObject* self = as_queue(object);
  if (!available(self, 1)) return nullptr;
  return guarded([&] {
    PyObject* popped = nullptr;
    pop(self, 1, [&](PyObject* block) { popped = block; });
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
    pop(self, count, [&](PyObject* block) { PyList_SET_ITEM(popped, i++, block); });
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
      indices[i] = index_of(self, PySequence_Fast_GET_ITEM(sequence, i));
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

PyObject* num_free_blocks(PyObject* self, void*) {
  return PyLong_FromLongLong(as_queue(self)->queue->num_free());
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

}  // namespace

const std::vector<PyMethodDef> kEngineMethods = {
    {"popleft", popleft, METH_NOARGS, nullptr},
    {"popleft_n", popleft_n, METH_O, nullptr},
    {"remove", remove, METH_O, nullptr},
    {"append", append, METH_O, nullptr},
    {"append_n", append_n, METH_O, nullptr},
    {"prepend_n", prepend_n, METH_O, nullptr},
    {"get_all_free_blocks", get_all_free_blocks, METH_NOARGS, nullptr},
    {"iter_blocks_after", iter_blocks_after, METH_O, nullptr},
};

const std::vector<PyGetSetDef> kEngineProperties = {
    {"num_free_blocks", num_free_blocks, nullptr, nullptr, nullptr},
    {"for_running", for_running, set_for_running, nullptr, nullptr},
};

}  // namespace kvquota
