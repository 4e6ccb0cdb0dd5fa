// Lets tensors that only claim to be on CUDA pass through autograd in a CPU build of torch: a device guard that does
// nothing, and hooks that say that there is a device. No kernel, no memory.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device first() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, first()); }
  c10::Device exchangeDevice(c10::Device) const override { return first(); }
  c10::Device getDevice() const override { return first(); }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new NoGuard());

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

}  // namespace

namespace at {
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::CUDAHooks)
}  // namespace at
