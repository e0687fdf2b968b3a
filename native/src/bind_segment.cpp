#include <pybind11/stl.h>

#include <cerrno>
#include <optional>
#include <system_error>

#include "bind.h"
#include "segment.h"

namespace py = pybind11;

namespace kvquota {
namespace {

using Amount = std::optional<int64_t>;

template <typename Payload, int64_t Flag, int64_t Payload::* Field>
void optional_field(py::class_<Payload>& cls, const char* name) {
  cls.def_property(
      name,
      [](const Payload& payload) { return (payload.flags & Flag) != 0 ? Amount(payload.*Field) : Amount(); },
      [](Payload& payload, Amount amount) {
        payload.*Field = amount.value_or(0);
        payload.flags = amount ? payload.flags | Flag : payload.flags & ~Flag;
      });
}

}  // namespace

void bind_segment(py::module_& m) {
  py::register_exception<SegmentError>(m, "SegmentError", PyExc_ValueError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  py::class_<Desired> desired(m, "Desired");
  desired.def(
      py::init([](int64_t revision, Amount limit, int64_t guarantee, int64_t headroom, Amount cache,
                  bool preempt, int64_t reclaim_sequence, int64_t reclaim_bytes) {
        const int64_t flags = (limit ? kHasLimit : 0) | (cache ? kHasCache : 0) | (preempt ? kPreempt : 0);
        return Desired{flags,    revision,          limit.value_or(0), guarantee,
                       headroom, cache.value_or(0), reclaim_sequence,  reclaim_bytes};
      }),
      py::kw_only(), py::arg("revision") = 0, py::arg("limit_bytes") = py::none(),
      py::arg("guarantee_bytes") = 0, py::arg("headroom_bytes") = 0, py::arg("cache_bytes") = py::none(),
      py::arg("preempt") = false, py::arg("reclaim_sequence") = 0, py::arg("reclaim_bytes") = 0);
  desired.def_readwrite("revision", &Desired::revision)
      .def_readwrite("guarantee_bytes", &Desired::guarantee_bytes)
      .def_readwrite("headroom_bytes", &Desired::headroom_bytes)
      .def_readwrite("reclaim_sequence", &Desired::reclaim_sequence)
      .def_readwrite("reclaim_bytes", &Desired::reclaim_bytes)
      .def_property(
          "preempt", [](const Desired& payload) { return (payload.flags & kPreempt) != 0; },
          [](Desired& payload, bool preempt) {
            payload.flags = preempt ? payload.flags | kPreempt : payload.flags & ~kPreempt;
          });
  optional_field<Desired, kHasLimit, &Desired::limit_bytes>(desired, "limit_bytes");
  optional_field<Desired, kHasCache, &Desired::cache_bytes>(desired, "cache_bytes");

  py::class_<Observed> observed(m, "Observed");
  observed.def(py::init<>())
      .def_readwrite("revision_decided", &Observed::revision_decided)
      .def_readwrite("revision_applied", &Observed::revision_applied)
      .def_readwrite("decided_at_ns", &Observed::decided_at_ns)
      .def_readwrite("applied_at_ns", &Observed::applied_at_ns)
      .def_readwrite("status", &Observed::status)
      .def_readwrite("reason", &Observed::reason)
      .def_readwrite("page_bytes", &Observed::page_bytes)
      .def_readwrite("capacity_pages", &Observed::capacity_pages)
      .def_readwrite("floor_pages", &Observed::floor_pages)
      .def_readwrite("target_pages", &Observed::target_pages)
      .def_readwrite("mapped_pages", &Observed::mapped_pages)
      .def_readwrite("pinned_pages", &Observed::pinned_pages)
      .def_readwrite("draining_pages", &Observed::draining_pages)
      .def_readwrite("evictable_pages", &Observed::evictable_pages)
      .def_readwrite("warm_pages", &Observed::warm_pages)
      .def_readwrite("retiring_pages", &Observed::retiring_pages)
      .def_readwrite("quarantined_pages", &Observed::quarantined_pages)
      .def_readwrite("credits", &Observed::credits)
      .def_readwrite("pages_mapped", &Observed::pages_mapped)
      .def_readwrite("pages_unmapped", &Observed::pages_unmapped)
      .def_readwrite("blocks_evicted", &Observed::blocks_evicted)
      .def_readwrite("passes", &Observed::passes)
      .def_readwrite("refused", &Observed::refused)
      .def_readwrite("blocked_ns", &Observed::blocked_ns)
      .def_readwrite("requests_waiting", &Observed::requests_waiting)
      .def_readwrite("requests_blocked", &Observed::requests_blocked)
      .def_readwrite("step", &Observed::step)
      .def_readwrite("ranks", &Observed::ranks)
      .def_readwrite("ranks_lost", &Observed::ranks_lost);
  optional_field<Observed, kHasLimit, &Observed::limit_bytes>(observed, "limit_bytes");

  py::class_<DesiredWriter>(m, "DesiredWriter")
      .def(py::init<>())
      .def("write", &DesiredWriter::write, py::arg("desired"))
      .def("fileno", &DesiredWriter::fileno)
      .def("close", &DesiredWriter::close);
  py::class_<DesiredReader>(m, "DesiredReader")
      .def(py::init<int>(), py::arg("fd"))
      .def("changed", &DesiredReader::changed)
      .def("read", &DesiredReader::read)
      .def("close", &DesiredReader::close);
  py::class_<ObservedWriter>(m, "ObservedWriter")
      .def(py::init<int>(), py::arg("fd"))
      .def("write", &ObservedWriter::write, py::arg("observed"))
      .def("pulse", &ObservedWriter::pulse, py::arg("pinned"), py::arg("evictable"), py::arg("warm"),
           py::arg("draining"))
      .def("close", &ObservedWriter::close);
  py::class_<ObservedReader>(m, "ObservedReader")
      .def(py::init<>())
      .def("read", &ObservedReader::read)
      .def("fileno", &ObservedReader::fileno)
      .def("close", &ObservedReader::close);
}

}  // namespace kvquota
