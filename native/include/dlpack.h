// DLPack's tensor, as far as an arena needs it, and the one that spans part of an arena.
// Layout: https://dmlc.github.io/dlpack/latest/c_api.html, the unversioned DLManagedTensor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace kvquota {

class Arena;

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

// `strides` in elements, row-major when not given. The tensor keeps the arena alive until its deleter runs,
// which may be on any thread. Throws std::invalid_argument when it does not lie within the arena.
DLManagedTensor* make_tensor(std::shared_ptr<Arena> arena, uint64_t offset, std::vector<int64_t> shape,
                             DLDataType dtype, std::optional<std::vector<int64_t>> strides);

}  // namespace kvquota
