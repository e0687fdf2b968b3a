#include <pybind11/stl.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena.h"
#include "bind.h"
#include "cuda_driver.h"
#include "device_record.h"
#include "dlpack.h"
#include "driver.h"
#include "fault_driver.h"
#include "host_driver.h"

namespace py = pybind11;

namespace kvquota {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Owned by the module, which is never unloaded.
PyObject* driver_error = nullptr;
PyObject* out_of_memory_error = nullptr;

uint64_t natural(const char* name, int64_t value) {
  if (value < 0)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", expected 0 or more");
  return static_cast<uint64_t>(value);
}

std::vector<uint64_t> naturals(const char* name, const std::vector<int64_t>& values) {
  std::vector<uint64_t> result;
  result.reserve(values.size());
  for (const int64_t value : values) result.push_back(natural(name, value));
  return result;
}

std::optional<uint8_t> fill_byte(std::optional<int64_t> fill) {
  if (!fill) return std::nullopt;
  if (*fill < 0 || *fill > 255)
    throw std::invalid_argument("fill is " + std::to_string(*fill) + ", not a byte");
  return static_cast<uint8_t>(*fill);
}

std::chrono::nanoseconds seconds(double timeout) {
  // Not above what a clock can add to now.
  if (!(timeout >= 0))
    throw std::invalid_argument("timeout is " + std::to_string(timeout) + ", expected 0 or more seconds");
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(timeout, 1e8) * 1e9));
}

void raise(const DriverError& error) {
  PyObject* type = error.out_of_memory() ? out_of_memory_error : driver_error;
  const py::object instance = py::reinterpret_borrow<py::object>(type)(error.what());
  instance.attr("operation") = error.operation;
  instance.attr("code") = error.code;
  instance.attr("name") = error.name;
  instance.attr("page") = error.page;
  PyErr_SetObject(type, instance.ptr());
}

void bind_errors(py::module_& m) {
  driver_error = PyErr_NewException("kvquota.native.DriverError", PyExc_RuntimeError, nullptr);
  out_of_memory_error = PyErr_NewException("kvquota.native.OutOfMemoryError", driver_error, nullptr);
  if (driver_error == nullptr || out_of_memory_error == nullptr) throw py::error_already_set();
  m.add_object("DriverError", driver_error);
  m.add_object("OutOfMemoryError", out_of_memory_error);
  py::register_exception<ArenaInUseError>(m, "ArenaInUseError", PyExc_BufferError);
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const DriverError& error) {
      raise(error);
    }
  });
}

void bind_drivers(py::module_& m) {
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver")
      .def_property_readonly("granularity", &Driver::granularity)
      .def("mem_get_info",
           [](Driver& driver) {
             const MemInfo info = [&] {
               const py::gil_scoped_release no_gil;
               return driver.mem_get_info();
             }();
             return py::make_tuple(info.free, info.total);
           })
      .def("address_reserve", &Driver::address_reserve, py::arg("size"), NoGil())
      .def("address_free", &Driver::address_free, py::arg("address"), py::arg("size"), NoGil())
      .def("mem_create", &Driver::mem_create, py::arg("size"), NoGil())
      .def("mem_release", &Driver::mem_release, py::arg("handle"), NoGil())
      .def("mem_map", &Driver::mem_map, py::arg("address"), py::arg("size"), py::arg("handle"), NoGil())
      .def("mem_unmap", &Driver::mem_unmap, py::arg("address"), py::arg("size"), NoGil())
      .def("mem_set_access", &Driver::mem_set_access, py::arg("address"), py::arg("size"), NoGil())
      .def("event_record", &Driver::event_record, NoGil())
      .def("event_query", &Driver::event_query, py::arg("event"), NoGil())
      .def("event_synchronize", &Driver::event_synchronize, py::arg("event"), NoGil())
      .def("event_destroy", &Driver::event_destroy, py::arg("event"), NoGil());

  py::class_<HostDriver, Driver, std::shared_ptr<HostDriver>>(m, "HostDriver", py::is_final())
      .def(py::init([](int64_t granularity, std::optional<int64_t> fill) {
             return std::make_shared<HostDriver>(natural("granularity", granularity), fill_byte(fill));
           }),
           py::kw_only(), py::arg("granularity") = 2 << 20, py::arg("fill") = py::none())
      .def("attach", &HostDriver::attach, py::arg("record_fd"), NoGil())
      .def("fileno", &HostDriver::fileno);

  py::class_<CudaDriver, Driver, std::shared_ptr<CudaDriver>>(m, "CudaDriver", py::is_final(),
                                                              py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::map<std::string, uintptr_t>& functions, int device, uintptr_t context,
                       int64_t granularity) {
             return std::make_shared<CudaDriver>(cuda::Functions(functions), device,
                                                 reinterpret_cast<cuda::Context>(context),
                                                 natural("granularity", granularity));
           }),
           py::arg("functions"), py::kw_only(), py::arg("device"), py::arg("context"),
           py::arg("granularity"))
      .def_property("stream", &CudaDriver::stream, &CudaDriver::set_stream);

  py::class_<FaultDriver, Driver, std::shared_ptr<FaultDriver>>(m, "FaultDriver", py::is_final())
      .def(py::init<std::shared_ptr<Driver>>(), py::arg("inner").none(false))
      .def(
          "fail",
          [](FaultDriver& driver, const std::string& operation, int64_t nth, int64_t times, int code,
             const std::string& name) {
            driver.fail(operation, natural("nth", nth), natural("times", times), code, name);
          },
          py::arg("operation"), py::arg("nth") = 1, py::arg("times") = 1, py::arg("code") = 5,
          py::arg("name") = "EIO")
      .def("calls", &FaultDriver::calls, py::arg("operation"));

  py::class_<DeviceRecord>(m, "DeviceRecord", py::is_final())
      .def_static(
          "create",
          [](int64_t capacity) { return DeviceRecord::create(natural("capacity_bytes", capacity)); },
          py::arg("capacity_bytes"))
      .def_static("open", &DeviceRecord::open, py::arg("fd"))
      .def_property_readonly("capacity_bytes", &DeviceRecord::capacity_bytes)
      .def_property_readonly("used_bytes", &DeviceRecord::used_bytes)
      .def("fileno", &DeviceRecord::fileno)
      .def("close", &DeviceRecord::close);
}

void destroy_capsule(PyObject* capsule) {
  // A consumer that took the tensor renames the capsule and calls the deleter itself.
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  tensor->deleter(tensor);
}

py::object dlpack(const std::shared_ptr<Arena>& arena, int64_t offset, std::vector<int64_t> shape,
                  uint8_t type_code, uint8_t type_bits, std::optional<std::vector<int64_t>> strides) {
  DLManagedTensor* tensor = make_tensor(arena, natural("offset", offset), std::move(shape),
                                        {type_code, type_bits, 1}, std::move(strides));
  PyObject* capsule = PyCapsule_New(tensor, "dltensor", destroy_capsule);
  if (capsule == nullptr) {
    tensor->deleter(tensor);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

void bind_arena(py::module_& m) {
  py::class_<Fault>(m, "Fault", py::is_final())
      .def_readonly("seq", &Fault::seq)
      .def_readonly("page", &Fault::page)
      .def_readonly("operation", &Fault::operation)
      .def_readonly("code", &Fault::code)
      .def_readonly("name", &Fault::name);

  py::class_<ArenaReport>(m, "ArenaReport", py::is_final())
      .def_readonly("done", &ArenaReport::done)
      .def_readonly("created", &ArenaReport::created)
      .def_readonly("refused", &ArenaReport::refused)
      .def_readonly("dropped", &ArenaReport::dropped)
      .def_readonly("mapped", &ArenaReport::mapped)
      .def_readonly("unmapped", &ArenaReport::unmapped)
      .def_readonly("quarantined_credits", &ArenaReport::quarantined_credits)
      .def_readonly("held_bytes", &ArenaReport::held_bytes)
      .def_readonly("faults", &ArenaReport::faults);

  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena", py::is_final(),
                                            py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<Driver> driver, const std::vector<int64_t>& strides, int64_t pages) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<Arena>(std::move(driver), naturals("stride", strides),
                                            natural("pages", pages));
           }),
           py::arg("driver").none(false), py::arg("strides"), py::arg("pages"))
      .def_property_readonly("base", [](const Arena& arena) { return arena.layout().base(); })
      .def_property_readonly("size", [](const Arena& arena) { return arena.layout().size(); })
      .def_property_readonly("pages", [](const Arena& arena) { return arena.layout().pages(); })
      .def_property_readonly("page_bytes", [](const Arena& arena) { return arena.layout().page_bytes(); })
      .def_property_readonly("strides", [](const Arena& arena) { return arena.layout().strides(); })
      .def_property_readonly("offsets", [](const Arena& arena) { return arena.layout().offsets(); })
      .def(
          "ask",
          [](Arena& arena, int64_t asked, int64_t dropped) {
            arena.ask(natural("asked", asked), natural("dropped", dropped));
          },
          py::arg("asked"), py::arg("dropped"), NoGil())
      .def(
          "apply",
          [](Arena& arena, int64_t seq, const std::vector<int64_t>& maps,
             const std::vector<int64_t>& unmaps) {
            arena.apply(natural("seq", seq), naturals("page", maps), naturals("page", unmaps));
          },
          py::arg("seq"), py::arg("maps"), py::arg("unmaps"), NoGil())
      .def(
          "wait_credits",
          [](Arena& arena, int64_t count, double timeout) {
            return arena.wait_credits(natural("count", count), seconds(timeout));
          },
          py::arg("count"), py::arg("timeout"), NoGil())
      .def("report", &Arena::report, NoGil())
      .def("fileno", &Arena::fileno)
      .def("dlpack", &dlpack, py::arg("offset"), py::arg("shape"), py::arg("type_code"), py::arg("type_bits"),
           py::arg("strides") = py::none())
      .def("close", &Arena::close, NoGil());
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_errors(m);
  bind_drivers(m);
  bind_arena(m);
}

}  // namespace kvquota
