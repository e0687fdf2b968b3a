#include "driver.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvquota {
namespace {

bool is_out_of_memory(const std::string& operation, const std::string& name) {
  return operation == op::kMemCreate &&
         (name == "ENOMEM" || name == "ENOSPC" || name == "CUDA_ERROR_OUT_OF_MEMORY");
}

// strerrorname_np is too young (glibc 2.32) for the systems that a wheel must run on.
std::string errno_name(int code) {
  switch (code) {
    case EACCES: return "EACCES";
    case EAGAIN: return "EAGAIN";
    case EBADF: return "EBADF";
    case EBUSY: return "EBUSY";
    case EEXIST: return "EEXIST";
    case EFBIG: return "EFBIG";
    case EINTR: return "EINTR";
    case EINVAL: return "EINVAL";
    case EIO: return "EIO";
    case EMFILE: return "EMFILE";
    case ENFILE: return "ENFILE";
    case ENOMEM: return "ENOMEM";
    case ENOSPC: return "ENOSPC";
    case EPERM: return "EPERM";
    case ETIMEDOUT: return "ETIMEDOUT";
    case EUSERS: return "EUSERS";
    default: return std::strerror(code);
  }
}

std::string describe(const DriverError& error, const std::string& detail) {
  return error.operation + " failed with " + error.name + " (" + std::to_string(error.code) + "): " + detail;
}

}  // namespace

DriverError::DriverError(std::string operation_, int code_, std::string name_, std::string detail_)
    : std::runtime_error(operation_ + " failed with " + name_ + " (" + std::to_string(code_) +
                         "): " + detail_),
      operation(std::move(operation_)),
      code(code_),
      name(std::move(name_)),
      detail(std::move(detail_)),
      out_of_memory_(is_out_of_memory(operation, name)) {}

DriverError::DriverError(const DriverError& error, uint64_t page_)
    : std::runtime_error(describe(error, error.detail + ", page " + std::to_string(page_))),
      operation(error.operation),
      code(error.code),
      name(error.name),
      detail(error.detail),
      page(page_),
      out_of_memory_(error.out_of_memory_) {}

DriverError DriverError::at(uint64_t page_) const { return DriverError(*this, page_); }

DriverError errno_error(const char* operation, int code, std::string detail) {
  return DriverError(operation, code, errno_name(code), std::move(detail));
}

}  // namespace kvquota
