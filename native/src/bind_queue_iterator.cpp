// The iterator over a page queue's free blocks.
#include "queue_object.h"

namespace kvquota {
namespace {

PyTypeObject* iterator_type = nullptr;

struct IteratorObject {
  PyObject_HEAD QueueObject* owner;
  int32_t block;  // the last one handed out; -1 before the first
  bool ended;
};

PyObject* iterator_next(PyObject* object) {
  auto* self = reinterpret_cast<IteratorObject*>(object);
  if (self->ended) return nullptr;
  self->block = self->owner->queue->after(self->block);
  self->ended = self->block < 0;
  return self->ended ? nullptr : block_at(self->owner, self->block);
}

int iterator_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<IteratorObject*>(object)->owner);
  return 0;
}

void iterator_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Py_DECREF(reinterpret_cast<PyObject*>(reinterpret_cast<IteratorObject*>(object)->owner));
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyType_Slot iterator_slots[] = {
    {Py_tp_dealloc, slot(iterator_dealloc)},
    {Py_tp_traverse, slot(iterator_traverse)},
    {Py_tp_iter, slot(PyObject_SelfIter)},
    {Py_tp_iternext, slot(iterator_next)},
    {0, nullptr},
};

PyType_Spec iterator_spec = {"kvquota.native._native.PageQueueIterator", sizeof(IteratorObject), 0,
                             kQueueFlags | Py_TPFLAGS_DISALLOW_INSTANTIATION, iterator_slots};

}  // namespace

PyObject* iterate_after(QueueObject* queue, int32_t block) {
  IteratorObject* iterator = PyObject_GC_New(IteratorObject, iterator_type);
  if (iterator == nullptr) return nullptr;
  Py_INCREF(reinterpret_cast<PyObject*>(queue));
  iterator->owner = queue;
  iterator->block = block;
  iterator->ended = false;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(iterator));
  return reinterpret_cast<PyObject*>(iterator);
}

void make_iterator_type() { iterator_type = reinterpret_cast<PyTypeObject*>(make_type(iterator_spec)); }

}  // namespace kvquota
