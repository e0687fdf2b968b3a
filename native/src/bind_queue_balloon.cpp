// The balloon's side of PageQueue: which pages are in circulation, and what is in them.
#include <string>
#include <vector>

#include "queue_object.h"

namespace kvquota {
namespace {

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

PyObject* allow(PyObject* self, PyObject* argument) {
  const Py_ssize_t pages = PyLong_AsSsize_t(argument);
  if (pages == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] {
    as_queue(self)->queue->allow(pages);
    Py_RETURN_NONE;
  });
}

PyObject* put(PyObject* object, PyObject* argument) {
  QueueObject* self = as_queue(object);
  int32_t page = 0;
  if (!to_page(argument, page)) return nullptr;
  return guarded([&] {
    self->queue->put(page);
    let_go(self, self->queue->blocks_of(page));
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
  if (as_queue(self)->queue->newly_grown().empty()) return PyList_New(0);
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
    hold(self, self->queue->blocks_of(page));
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

PyObject* uncache_all(PyObject* self, PyObject*) {
  as_queue(self)->queue->uncache_all();
  Py_RETURN_NONE;
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
    check_references(as_queue(self));
    Py_RETURN_NONE;
  });
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

}  // namespace

const std::vector<PyMethodDef> kBalloonMethods = {
    {"allow", allow, METH_O, nullptr},
    {"put", put, METH_O, nullptr},
    {"grown", grown, METH_NOARGS, nullptr},
    {"victims", victims, METH_O, nullptr},
    {"take", take, METH_O, nullptr},
    {"give", give, METH_O, nullptr},
    {"drain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(drain)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"uncache_all", uncache_all, METH_NOARGS, nullptr},
    {"is_draining", is_draining, METH_O, nullptr},
    {"usage", usage, METH_NOARGS, nullptr},
    {"used_blocks", used_blocks, METH_O, nullptr},
    {"in_circulation", in_circulation, METH_O, nullptr},
    {"check", check, METH_NOARGS, nullptr},
};

const std::vector<PyGetSetDef> kBalloonProperties = {
    {"num_used_blocks", num_used_blocks, nullptr, nullptr, nullptr},
    {"num_uncached_blocks", num_uncached_blocks, nullptr, nullptr, nullptr},
    {"max_free_blocks", max_free_blocks, nullptr, nullptr, nullptr},
};

}  // namespace kvquota
